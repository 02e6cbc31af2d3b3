"""The Keeper in loops of other libraries: one line each. A module imports its library, and nothing else imports it."""
