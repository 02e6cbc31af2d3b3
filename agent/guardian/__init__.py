"""The process that ends what is left when an agent is gone."""
