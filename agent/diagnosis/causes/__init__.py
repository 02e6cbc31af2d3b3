"""Recognises the usual causes of failures, and says what to do about each."""
