"""Finds out whether this node can train: `elaunch doctor`, and the quick checks before a node joins a job."""
