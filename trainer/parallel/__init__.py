"""How a training is divided among its workers: the plan of `--parallel`, and what it makes of the network."""
