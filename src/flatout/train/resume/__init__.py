"""Continues from a checkpoint, and refuses a checkpoint of another job."""
