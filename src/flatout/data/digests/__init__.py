"""Digests of data and of a user's code, and the objects that the code uses."""
