"""The rendezvous protocol as pure functions over a snapshot of the store."""
