"""Decoded rows of files: their schema, blocks of columns, and access by row index."""
