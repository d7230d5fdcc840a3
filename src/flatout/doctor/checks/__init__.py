"""What holds a script back, or endangers its result: a file per check.

A check is a function of an Observation that gives its Findings. Where the signal that it needs
could not be had, it raises NoSignal with the reason: it does not guess.
"""

from flatout.doctor.checks.check import CHECKS, Check, NoSignal

__all__ = ["CHECKS", "Check", "NoSignal"]
