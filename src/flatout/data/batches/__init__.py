"""Batches of tensors, made from blocks of rows, samples, or output of loaders."""
