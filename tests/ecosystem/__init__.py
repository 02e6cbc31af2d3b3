"""Programs in the style of the libraries' own documentation, run as they are: `make ecosystem`."""
