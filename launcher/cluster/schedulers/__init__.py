"""What each scheduler says in its variables: one module for each scheduler, and the registry of them all."""
