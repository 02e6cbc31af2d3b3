"""The process that imports once and forks each worker."""
