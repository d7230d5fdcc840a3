"""Embedding tables that are stepped by rows, and checks of the ids that read them."""
