"""HTTP/1.1 over TCP and TLS, with a deadline for each call."""
