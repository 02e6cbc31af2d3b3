"""What a cluster's scheduler says about this job in the environment, and what the command line leaves to it."""
