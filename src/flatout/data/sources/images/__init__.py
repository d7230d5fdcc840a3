"""Folders and records of images."""
