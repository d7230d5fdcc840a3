"""Nested values as tensors and JSON, never as pickle: what files keep and ranks exchange."""
