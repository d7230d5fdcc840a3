"""Execution of pipelines: assigning rows to batches, making and keeping samples and batches."""
