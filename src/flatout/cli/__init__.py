"""The commands. They parse, call the rooms below, and print."""
