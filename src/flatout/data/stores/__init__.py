"""Decoded rows that are stored, in memory or in a folder."""
