"""Pipes, from which rows come in sequence, once."""
