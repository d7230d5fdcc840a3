"""Files of comma-separated values, and other text with delimiters."""
