"""Inspection of files before training: contents, reading rate, and advice."""
