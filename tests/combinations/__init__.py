"""Trains in many combinations of features, and compares each with a plain loop."""
