"""Keeps the outputs of frozen layers, so that later epochs do not compute them again."""
