"""`make gpu`: the tests and benches that only a GPU can run, in nine minutes; their figures: bench/results/gpu.md."""
