"""Check for samples that are decoded again in each epoch, though all would fit in memory."""

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

_MUCH = 0.2
"""Smallest share of the loader's time for which decoding is worth a cache."""


@check(lane="input")
def look(observation: Observation) -> Findings:
    """Report costly decoding whose results would fit in memory."""
    for loader in training_loaders(observation):
        if share(observation, lane(observation, "input")) < HUNGRY:
            continue
        cost = loader_ms(observation, loader, "decode")
        whole = sum(loader.lanes_ms.values())
        if loader.lanes_ms["decode"] < _MUCH * whole or share(observation, cost) < HUNGRY:
            continue
        size = cached_mb(loader)
        if size is None:
            raise NoSignal("the number and size of the samples were not observed")
        if observation.available_mb is None:
            raise NoSignal("the free memory was not observed")
        if fits_in_memory(observation, size):
            most = cost if loader.is_iterable else making_ms(observation, loader)
            yield _finding(loader, most, size, observation.available_mb)


def _finding(loader: Loader, cost: float, size: float, free: float) -> Finding:
    return Finding(
        kind="slow",
        what=f"decoding takes {ms(loader.lanes_ms['decode'])} a batch, in each epoch again; all "
        f"{loader.length:,} samples take {size:,.0f} MB decoded, {free:,.0f} MB are free",
        do="keep what was decoded, before anything random: in the dataset, or with "
        "flatout.data.images(...).cache()",
        where=at(loader.decodes_at or hot(loader)),
        cost_ms=cost,
        parity="bit-identical",
        recipe={} if loader.is_iterable else {"script.cache": "memory"},
    )
