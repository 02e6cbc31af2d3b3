"""`elaunch rehearse`: runs a script again and again, kills it at chosen moments, and compares."""
