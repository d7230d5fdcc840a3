"""A file per kind of input."""
