"""Answers what `elaunch status`, `elaunch top` and `elaunch stacks` ask this node."""
