"""Training on several ranks from a notebook."""
