"""What a training consists of: models, optimizers, random generators, as bytes and back."""
