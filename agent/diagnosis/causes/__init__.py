"""Recognises the usual causes of failures, with a next step for each."""
