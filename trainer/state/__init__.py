"""The state of a training: models, optimizers and random generators, as bytes and back."""
