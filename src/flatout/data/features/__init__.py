"""What frozen layers gave, kept by sample for later epochs and runs."""
