"""DistributedDataParallel: its buckets, its options, and its communication hooks."""
