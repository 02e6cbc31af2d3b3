"""One agent per node: a pure core (events to actions), its hands around it."""
