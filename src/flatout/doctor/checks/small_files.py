"""Check for samples in a file each."""

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
from flatout.observe import Observation

_ONE_EACH = 0.5
"""Opened files per sample from which on samples count as being in separate files."""


@check(lane="input")
def look(observation: Observation) -> Findings:
    """Report costly opening and reading of a file for each sample."""
    for loader in training_loaders(observation):
        if loader.opens_per_sample is None:
            raise NoSignal("the files that the loader opens were not observed")
        if (
            loader.opens_per_sample < _ONE_EACH
            or share(observation, lane(observation, "input")) < HUNGRY
        ):
            continue
        cost = loader_ms(observation, loader, "read")
        if share(observation, cost) < HUNGRY:
            continue
        is_kept = not loader.is_iterable and fits_in_memory(observation, cached_mb(loader))
        yield Finding(
            kind="slow",
            what=f"{loader.opens_per_sample:.1f} files are opened for each sample; reading "
            f"takes {ms(loader.lanes_ms['read'])} a batch",
            do="pack them once: flatout data convert FOLDER packed.tfrecord"
            + (", or keep the samples in memory: they fit" if is_kept else ""),
            where=at(hot(loader)),
            cost_ms=making_ms(observation, loader) if is_kept else cost,
            parity="bit-identical",
            recipe={"script.cache": "memory"} if is_kept else {},
        )
