"""`make gpu`: the tests and benches that only a GPU can run, within nine minutes, and their figures in docs/gpu.md."""
