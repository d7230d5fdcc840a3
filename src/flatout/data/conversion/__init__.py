"""Conversion of files to another format: each file whole or absent, resumable, with checksums."""
