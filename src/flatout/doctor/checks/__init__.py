"""What holds a script back, or endangers its result: a file per check.

A check is a function of an Observation that gives its Findings. Where the signal that it needs
could not be had, it raises NoSignal with the reason: it does not guess. Every file of this folder
is imported here, by name, and registers its check.
"""

from importlib import import_module
from pkgutil import iter_modules

from flatout.doctor.checks.check import CHECKS, RANK_CHECKS, NoSignal

for _file in sorted(module.name for module in iter_modules(__path__)):
    import_module(f"{__name__}.{_file}")

__all__ = ["CHECKS", "RANK_CHECKS", "NoSignal"]
