"""What this agent decides: events in, actions out, no I/O."""
