"""The meeting of a job's nodes: their store, and the comparison of what they are about to run."""
