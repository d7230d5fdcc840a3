"""Outputs of frozen layers, stored by sample for later epochs and runs."""
