"""Reads each scheduler's environment variables: one module for each scheduler, and the registry of them all."""
