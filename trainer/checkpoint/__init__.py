"""Durable checkpoints in a folder: written, sealed, found and loaded."""
