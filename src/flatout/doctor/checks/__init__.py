"""Checks of a script for problems that slow it down or endanger its result: one file per check.

A check is a function of an Observation that returns Findings. If the signal that it needs is
missing, it does not guess, but raises NoSignal with the reason. This file imports every file of
the folder, by name, and each registers its check.
"""

from importlib import import_module
from pkgutil import iter_modules

from flatout.doctor.checks.check import CHECKS, RANK_CHECKS, NoSignal

for _file in sorted(module.name for module in iter_modules(__path__)):
    import_module(f"{__name__}.{_file}")

__all__ = ["CHECKS", "RANK_CHECKS", "NoSignal"]
