"""Conversion of files to another format: resumable, with checksums and no partial files."""
