"""`elaunch status`, `elaunch top` and `elaunch stacks`: how a running job is doing."""
