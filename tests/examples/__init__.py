"""The programs of examples/: each runs, trains, and survives the kill of a worker."""
