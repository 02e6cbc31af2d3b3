"""A project of one's own, started as `-m package.train`."""
