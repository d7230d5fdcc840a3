"""Writing files in another format: whole or absent, restarted where they were, with checksums."""
