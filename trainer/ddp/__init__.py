"""DistributedDataParallel: its buckets and its communication hooks."""
