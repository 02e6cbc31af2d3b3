"""Which samples a step trains on, and who computes them."""
