"""The process that ends the workers and their orphans when the agent has died."""
