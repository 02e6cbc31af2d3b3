"""The ranks of a group, and what they tell each other."""
