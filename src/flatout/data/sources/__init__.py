"""Sources of data, in a file per kind of input."""
