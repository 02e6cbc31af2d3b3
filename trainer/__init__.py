"""The bundled trainer; its parts are usable from any training script."""
