"""A user's Dataset, DataLoader or iterable."""
