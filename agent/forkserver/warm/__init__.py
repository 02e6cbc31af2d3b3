"""A fork server that outlives its job, and forks the fork servers of the next ones."""
