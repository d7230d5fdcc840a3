"""Learning rate of a scheduler as a function of its steps, where it can be computed ahead."""

from __future__ import annotations

import dis
from collections.abc import Callable
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

# Maximum number of steps ahead in which the end of a rate is searched. _AHEAD: limit in
# `ends_after`; _FAR_AHEAD: limit in `made_for`.
_AHEAD, _FAR_AHEAD = 2000, 20_000
# Shares of the highest rate below which a rate counts as practically zero (_NOTHING) or as zero
# (_ZERO).
_NOTHING, _ZERO = 0.02, 1e-6
_PURE_MODULES = ("math", "numpy")
_PURE_PACKAGES = ("transformers", "diffusers", "timm")
_PURE_BUILTINS = {"min", "max", "float", "int", "abs", "pow", "round", "sum", "len"}
_CHANGES = ("STORE_GLOBAL", "STORE_DEREF", "STORE_ATTR", "STORE_SUBSCR", "YIELD_VALUE")

Curve = Callable[[int], float]


def ends_after(scheduler: Any) -> int | None:
    """Return the steps after which the rate is practically zero.

    None where the rate never is, or cannot be computed ahead.
    """
    if _is_chain(scheduler):
        last = ends_after(scheduler._schedulers[-1])
        return None if last is None else last + int(scheduler._milestones[-1])
    curve = _curve(scheduler)
    if curve is None:
        return None
    kept = scheduler.last_epoch
    try:
        return _first_below(_NOTHING, curve, _AHEAD)
    finally:
        scheduler.last_epoch = kept


def made_for(scheduler: Any) -> int | None:
    """Return the steps that a scheduler is made for: by its arguments, or until its rate is zero.

    None where neither number is known.
    """
    if _is_chain(scheduler):
        last = made_for(scheduler._schedulers[-1])
        return None if last is None else last + int(scheduler._milestones[-1])
    for name in ("T_max", "total_steps"):
        value = getattr(scheduler, name, None)
        if isinstance(value, int | float) and value > 0:
            return int(value)
    curve = _of_function(scheduler)
    if curve is None:
        return None
    return _first_below(_ZERO, curve, _FAR_AHEAD)


def _first_below(share: float, curve: Curve, steps: int) -> int | None:
    highest = 0.0
    try:
        for step in range(steps):
            rate = curve(step)
            if highest > 0 and rate <= share * highest:
                return step
            highest = max(highest, rate)
    except Exception:  # raised by the script's own function
        return None
    return None


def _is_chain(scheduler: Any) -> bool:
    return bool(getattr(scheduler, "_milestones", None) and getattr(scheduler, "_schedulers", None))


def _curve(scheduler: Any) -> Curve | None:
    closed = getattr(scheduler, "_get_closed_form_lr", None)
    if closed is None:
        return _of_function(scheduler)

    def rate(step: int) -> float:
        scheduler.last_epoch = step
        return float(closed()[0])

    return rate


def _of_function(scheduler: Any) -> Curve | None:
    functions = getattr(scheduler, "lr_lambdas", None)
    if type(scheduler).__name__ != "LambdaLR" or not functions or not _is_pure(functions[0]):
        return None
    return lambda step: float(functions[0](step))


def _is_pure(function: Any) -> bool:
    while isinstance(function, partial):
        function = function.func
    if not isinstance(function, FunctionType):
        return False
    if function.__module__.partition(".")[0] in _PURE_PACKAGES:
        return True
    instructions = list(dis.get_instructions(function))
    if any(item.opname in _CHANGES for item in instructions):
        return False
    outside = {item.argval for item in instructions if item.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    used = [function.__globals__.get(name, name) for name in outside]
    used += [cell.cell_contents for cell in function.__closure__ or ()]
    return all(map(_is_arithmetic, used))


def _is_arithmetic(value: Any) -> bool:
    if isinstance(value, ModuleType):
        return value.__name__ in _PURE_MODULES
    if isinstance(value, str):
        return value in _PURE_BUILTINS
    is_of_math = getattr(value, "__module__", None) == "math"
    return isinstance(value, int | float) or is_of_math
