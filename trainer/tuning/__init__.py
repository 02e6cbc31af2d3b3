"""Measures how DDP should send gradients, chooses, and remembers the choice."""
