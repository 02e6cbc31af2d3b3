"""A few steps of a training under torch.profiler on all ranks: the traces joined for Perfetto, and one table."""
