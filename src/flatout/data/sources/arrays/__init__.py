"""Arrays in memory and in files."""
