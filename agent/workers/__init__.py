"""Starts this node's workers, reads their links, and signals them."""
