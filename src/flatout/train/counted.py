"""Counts the operators of a fit's first step, which is a normal step of the run, for its History.

If other parameters train later, the next step is counted, and replaces these counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from flatout.measure import fingerprint, known_rates
from flatout.models import (
    OperatorCount,
    has_compiled,
    left_before_compiled,
    weights_counted,
)
from flatout.recipe import Parity
from flatout.train.loop import Loop


def operator_count(loop: Loop) -> OperatorCount | None:
    """Return a counter for the next step; None for compiled models, which it would run otherwise.

    A rank that runs only a stage gets None, too: most of its step time is outside the operators.
    """
    asked = loop.resolved is not None and loop.resolved.compute.compile == "on"
    if asked or has_compiled(loop.model) or loop.takes_whole_batches:
        return None
    return OperatorCount()


@contextmanager
def counting(count: OperatorCount, loop: Loop) -> Iterator[Callable[[], bool]]:
    """Count the operators that run within this context.

    Compiled code would round differently while operators are counted. So if `allow` is exact,
    counting ends before the first call of compiled code.
    """
    if loop.asked.allow is Parity.EXACT:
        with left_before_compiled(count) as is_left:
            yield lambda: not is_left()
    else:
        with count:
            yield lambda: True


def counted(count: OperatorCount, loop: Loop) -> dict[str, Any]:
    """Return the counted step as plain data, as `flatout.measure.roofline` takes it."""
    device, threads = loop.device.type, torch.get_num_threads()
    loop.timeline.settle()
    return {
        "device": device,
        "threads": threads,
        "machine": fingerprint().digest,
        "rates": known_rates(device, threads),
        "step": loop.timeline.steps,
        "samples": int(loop.timeline.step_samples()[-1]),
        "lanes": count.lanes(),
        "weights": weights_counted(loop.model, loop.optimizers),
    }
