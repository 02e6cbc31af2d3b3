"""The ranks of a group, and what they exchange."""
