"""The commands: a file each. They parse, call the rooms below, and print."""
