"""What workers write, and where it goes."""
