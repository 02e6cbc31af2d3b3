"""Reads facts from this node: its devices, limits, disks, network and programs."""
