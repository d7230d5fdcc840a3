"""Check for transforms that run in Python, sample by sample."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import (
    HUNGRY,
    at,
    cached_mb,
    fits_in_memory,
    hot,
    lane,
    loader_ms,
    making_ms,
    ms,
    share,
    training_loaders,
)
from flatout.doctor.finding import Finding
from flatout.observe import Loader, Observation

_MUCH = 0.3
"""Share of the loader's time from which on the transform is reported."""


@check(lane="input")
def look(observation: Observation) -> Findings:
    """Report transforms that take much of a loader's time while the step waits for it."""
    for loader in training_loaders(observation):
        if loader.gives_batches or share(observation, lane(observation, "input")) < HUNGRY:
            continue
        cost = loader_ms(observation, loader, "transform")
        if _share(loader) >= _MUCH and share(observation, cost) >= HUNGRY:
            is_kept = not loader.is_iterable and fits_in_memory(observation, cached_mb(loader))
            most = making_ms(observation, loader) if is_kept else cost
            yield _finding(loader, most, is_kept=is_kept)


def _share(loader: Loader) -> float:
    whole = sum(loader.lanes_ms.values())
    if not whole:
        raise NoSignal("the loader's own time was not observed")
    return loader.lanes_ms["transform"] / whole


def _finding(loader: Loader, cost: float, *, is_kept: bool) -> Finding:
    each = loader.lanes_ms["transform"] / (loader.batch_size or 1)
    return Finding(
        kind="slow",
        what=f"transforms in Python take {_share(loader):.0%} of the loader's time: "
        f"{ms(loader.lanes_ms['transform'])} a batch, {ms(each)} a sample",
        do="transform whole batches: in __getitems__, in collate_fn, or on the device after the "
        "copy; or keep the samples, where nothing in them is random",
        where=at(hot(loader)),
        cost_ms=cost,
        parity="rounding",
        recipe={"script.cache": "memory"} if is_kept else {},
    )
