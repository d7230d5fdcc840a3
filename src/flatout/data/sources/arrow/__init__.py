"""Parquet and Arrow files, and tables in memory."""
