"""Check for steps whose time does not depend on the batch size, so larger batches are faster."""

from __future__ import annotations

from math import ceil
from statistics import median

from flatout.doctor.checks.check import NoSignal, check
from flatout.doctor.checks.signals import (
    SLOW_RATE,
    WAITS,
    arithmetic_rate,
    at,
    batches_per_step,
    busy_share,
    is_gpu,
    lane,
    made,
    models,
    ms,
    samples_per_call,
    share,
    step_ms,
    training_loaders,
)
from flatout.doctor.finding import Finding
from flatout.observe import Loader, Observation, Site

_COMPUTES = 0.5
"""Smallest share of a step's time in the model, since the time of input grows with the batch."""

_FAST = 0.05
"""Quantile of step times that is compared: slower steps also wait for a CPU."""

_ROOM = 5
"""Minimum factor by which a batch could grow while the calls still take longer than arithmetic."""

_PART, _FEWEST = 0.6, 4
"""Conditions to compare the last batches of epochs with whole batches.

_PART: largest size of a last batch relative to a whole batch; _FEWEST: minimum number of such last
    batches.
"""

_AS_LONG = 0.9
"""Ratio of step times, smaller batch over whole batch, from which on both count as equally long."""


@check()
def look(observation: Observation) -> list[Finding]:
    """Report that step time hardly depends on the number of samples.

    The evidence is the time of the last batches of epochs, otherwise the step's FLOP.
    """
    whole = step_ms(observation)
    if observation.world_size > 1:
        raise NoSignal("what the ranks wait for one another is a part of each step")
    if share(observation, lane(observation, "forward", "backward", "optimizer")) < _COMPUTES:
        return []
    model = models(observation)[0]
    busy = busy_share(observation)
    if busy is not None:
        if busy >= WAITS:
            return []
        time = (
            f"the GPU computes for {busy:.0%} of a step of {ms(whole)}, and otherwise waits for "
            "the "
        )
        return [_finding(f"{time}host to call the next operators", _site(observation))]
    by_size = _last_and_whole(observation)
    if by_size is not None:
        left, last = by_size
        if last < _AS_LONG * whole:
            return []
        what = f"the last batch of an epoch has {left} samples and takes {ms(last)}, a whole one"
        return [_finding(f"{what} {ms(whole)}", _site(observation))]
    mean, size = arithmetic_rate(observation, model), samples_per_call(observation)
    if is_gpu(observation) or mean is None or size is None:
        raise NoSignal("neither batches of two sizes nor the arithmetic of a step were observed")
    fast = sorted(observation.step_ms)[int(_FAST * len(observation.step_ms))]
    rate = mean * max(1.0, 1 / share(observation, fast))
    if rate * _ROOM >= SLOW_RATE:
        return []
    what = f"a batch of {size} takes {ms(fast)} or more, at {rate / 1e6:,.0f} MFLOP/s or less"
    return [
        _finding(f"{what}: calling operators takes the time, not the samples", _site(observation))
    ]


def _last_and_whole(observation: Observation) -> tuple[int, float] | None:
    try:
        (loader,) = training_loaders(observation)
    except (NoSignal, ValueError):
        return None
    left = _left(loader)
    if (
        left is None
        or batches_per_step(observation) != 1
        or len(observation.step_ms) != observation.steps
    ):
        return None
    each = ceil((loader.length or 0) / (loader.batch_size or 1))
    last = observation.step_ms[each - 1 :: each]
    is_whole = ceil(
        observation.steps / each
    ) == loader.epochs and loader.batches - observation.steps in (0, 1)
    if each < 2 or len(last) < _FEWEST or not is_whole:
        return None
    return left, median(last)


def _left(loader: Loader) -> int | None:
    if not loader.length or not loader.batch_size or loader.drop_last or loader.gives_batches:
        return None
    left = loader.length % loader.batch_size
    return left if 0 < left <= _PART * loader.batch_size else None


def _site(observation: Observation) -> Site | None:
    sites = [made(loader) for loader in observation.loaders if loader.in_training]
    return next((site for site in sites if site is not None), observation.models[0].site)


def _finding(what: str, site: Site | None) -> Finding:
    return Finding(
        kind="note",
        what=what,
        do="a batch 2 and 4 times as large takes about as long, with a learning rate for it; "
        "look at the validation figures after the same number of samples",
        where=at(site),
        parity="changes learning",
    )
