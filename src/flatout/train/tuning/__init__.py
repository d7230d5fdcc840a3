"""Tries open settings on a few samples and then on the job's own steps, and keeps the fastest."""
