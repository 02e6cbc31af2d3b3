"""Measures elaunch beside torchrun: `make bench`."""
