"""Threads and processes that make batches ahead."""
