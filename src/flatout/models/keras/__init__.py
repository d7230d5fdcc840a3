"""Keras models on the torch backend. All uses of Keras' internals are in this package."""
