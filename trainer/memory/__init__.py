"""Training state in the nodes' memory, which outlives the workers."""
