"""How a running job is doing (`elaunch status`, `top`, `stacks`), and what happened in a run (`report`)."""
