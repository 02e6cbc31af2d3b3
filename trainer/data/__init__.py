"""Which samples a step trains on, and which rank computes them."""
