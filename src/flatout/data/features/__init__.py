"""Outputs of frozen layers, kept by sample for later epochs and runs."""
