"""The record of which rank computed which samples, and the check that each was computed once."""
