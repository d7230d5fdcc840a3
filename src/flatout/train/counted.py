"""Counts the operators of a fit's first step, for its History: a step of the run like any other.

Where other parameters train than before, the next step is counted in its place.
"""

from __future__ import annotations

from typing import Any

import torch

from flatout.measure import fingerprint, known_rates
from flatout.models import OperatorCount, compiles_here, has_compiled, weights_counted
from flatout.recipe import Parity
from flatout.train.loop import Loop


def operator_count(loop: Loop) -> OperatorCount | None:
    """What counts the next step; None where the model is compiled: it would run otherwise.

    So would a function of the user's own that is compiled, and be rounded otherwise. Of a rank that
    has a stage alone neither, for most of a step's time is not of these operators.
    """
    asked = loop.resolved is not None and loop.resolved.compute.compile == "on"
    may_round = loop.allow is Parity.EXACT and compiles_here()
    if asked or may_round or has_compiled(loop.model) or loop.takes_whole_batches:
        return None
    return OperatorCount()


def counted(count: OperatorCount, loop: Loop) -> dict[str, Any]:
    """The step that was counted as plain data, as `flatout.measure.roofline` takes it."""
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
