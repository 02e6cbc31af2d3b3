"""Moves the workers' output to the console and to files."""
