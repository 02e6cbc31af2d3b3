"""Judges what was read from this node: facts in, findings out (pure)."""
