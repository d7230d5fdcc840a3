"""Compiled Keras models: their losses, metrics, callbacks and own steps."""
