"""What is killed: a file per kind, and what they share."""
