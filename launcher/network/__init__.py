"""The addresses and interfaces of this host."""
