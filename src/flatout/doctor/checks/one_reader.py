"""Check for a single process that reads all samples from one large file while the model waits."""

from __future__ import annotations

from pathlib import Path

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import (
    HUNGRY,
    at,
    hot,
    lane,
    loader_ms,
    ms,
    share,
    training_loaders,
)
from flatout.doctor.finding import Finding
from flatout.observe import Loader, Observation
from flatout.words import size_words

_MUCH = 0.5
"""Share of the loader's time from which on reading is the bottleneck."""

_READERS = 4
"""Number of parts to suggest: disks and decompression rarely scale much further."""


@check()
def look(observation: Observation) -> Findings:
    """Report that the step waits for a single reader of a single file."""
    for loader in training_loaders(observation):
        if share(observation, lane(observation, "input")) < HUNGRY or (loader.num_workers or 0) > 1:
            continue
        cost = loader_ms(observation, loader, "read")
        if loader.lanes_ms["read"] < _MUCH * sum(loader.lanes_ms.values()):
            continue
        if loader.open_files is None:
            raise NoSignal("the files that the loader reads were not observed")
        if observation.usable_cpus is None:
            raise NoSignal("the number of CPUs was not observed")
        parts = min(_READERS, observation.usable_cpus)
        gives_back = cost * (1 - 1 / parts)
        # While the model waits, its own CPU is free for one more reader.
        if len(loader.open_files) == 1 and share(observation, gives_back) >= HUNGRY:
            yield _finding(loader, parts, gives_back)


def _finding(loader: Loader, parts: int, gives_back: float) -> Finding:
    ((path, size),) = loader.open_files or [("", 0)]
    return Finding(
        kind="slow",
        what=f"one process reads one file, {Path(path).name} of {size_words(size)}: "
        f"{ms(loader.lanes_ms['read'])} a batch, for which the model waits",
        do=f"split it into {parts} files or ranges, one for each of {parts} workers: every "
        f"{parts}th batch in each keeps the order",
        where=at(hot(loader)),
        cost_ms=gives_back,
        is_estimate=True,  # reading from a disk also overlaps with the step
        parity="bit-identical",
    )
