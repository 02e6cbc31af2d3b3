"""What an agent gives to those who ask or wait for it: its status, metrics, and the user's command for events."""
