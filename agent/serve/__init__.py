"""What an agent serves: its status, metrics, and the user's command for events."""
