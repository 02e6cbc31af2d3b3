"""Keeps the state of a training, so that a failure costs no step."""
