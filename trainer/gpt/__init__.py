"""The bundled example: a small GPT over bytes."""
