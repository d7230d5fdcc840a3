"""What holds a job back, and what to do about it."""

from flatout.doctor.finding import Finding

__all__ = ["Finding"]
