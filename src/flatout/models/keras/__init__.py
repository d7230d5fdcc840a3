"""Keras models on the torch backend: all that Flatout takes from within Keras is in here."""
