"""Prometheus metrics of one node (`--metrics-port`)."""
