"""Combinations of features: each trains, and its result is compared with a plain loop."""
