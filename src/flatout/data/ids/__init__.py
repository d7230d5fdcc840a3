"""Rows of a table for the ids of a column, kept from training to training."""
