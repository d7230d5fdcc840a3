"""Check for a dataset divided into more parts than there are ranks or workers to read them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import gcd

from flatout.doctor.checks.check import Findings, NoSignal, rank_check
from flatout.doctor.checks.signals import at, has_peers, made, training_loaders
from flatout.doctor.finding import Finding
from flatout.observe import Loader, Observation
from flatout.words import counted


@rank_check()
def look(observations: Sequence[Observation]) -> Findings:
    """Report ranks or workers that each take every n-th sample, but fewer than n parts in all."""
    loaders = [training_loaders(rank)[0] for rank in observations]
    if has_peers(observations):
        yield from _blocks(loaders)
    elif not _has_streaming_workers(loaders[0]):
        return
    known = [part for loader in loaders for part in _parts(loader)]
    lengths, steps = {loader.parts_of or 0 for loader in loaders}, {each for _, each in known}
    if len(lengths) > 1 or len(steps) > 1:
        return
    (length,), (each,) = lengths, steps
    taken = {remainder for remainder, _ in known}
    missing = each - len(taken)
    # Evenly skipped samples, as in frames at a lower rate, are skipped on purpose.
    if not missing or reduce(gcd, (remainder - min(taken) for remainder in taken), each) > 1:
        return
    streams = [loader for loader in loaders if loader.is_iterable]
    yield Finding(
        kind="danger",
        what=f"{_takers(loaders)} take each {each}-th of {length:,} samples, but together only "
        f"{len(taken)} of these {each} parts: {missing / each:.0%} of the samples are never "
        f"trained on{_twice(known, loaders)}",
        do="share out by all that take part: each (world_size * num_workers)-th sample, from "
        "rank * num_workers + the worker's id on"
        if streams
        else "take each world_size-th sample, from the rank on; or DistributedSampler",
        where=at(loaders[0].dataset_site or loaders[0].site if streams else made(loaders[0])),
        parity="changes learning",
    )


def _blocks(loaders: Sequence[Loader]) -> Findings:
    blocks = sorted(loader.block for loader in loaders if loader.block is not None)
    if len(blocks) < len(loaders) or len({of for _, _, of in blocks}) > 1:
        return
    end = 0
    for first, count, _ in blocks:
        if first != end:
            return
        end += count
    size, of = blocks[0][1], blocks[0][2]
    more = round((of - end) / size)
    if not more or abs(of - end - more * size) > more + len(blocks):
        return
    yield Finding(
        kind="note",
        what=f"{len(blocks)} ranks take {end:,} of {of:,} samples, in blocks that follow one "
        f"another; the rest is {counted(more, 'more such block')}, which no rank takes",
        do="share out among world_size ranks, unless the rest is held out",
        where=at(made(loaders[0])),
        parity="changes learning",
    )


def _parts(loader: Loader) -> list[tuple[int, int]]:
    known = [part for part in loader.parts or () if part is not None]
    if not known or (loader.is_iterable and len(known) < len(loader.parts or ())):
        raise NoSignal("the samples that the ranks and workers take were not observed")
    return known


def _has_streaming_workers(loader: Loader) -> bool:
    return bool(loader.is_iterable) and (loader.num_workers or 0) > 1


def _takers(loaders: Sequence[Loader]) -> str:
    workers = max(1, loaders[0].num_workers or 0) if loaders[0].is_iterable else 1
    if len(loaders) == 1:
        return counted(workers, "worker")
    return f"{len(loaders)} ranks" + (f" of {counted(workers, 'worker')}" if workers > 1 else "")


def _twice(parts: Sequence[tuple[int, int]], loaders: Sequence[Loader]) -> str:
    is_stream = all(loader.is_iterable for loader in loaders)
    return ", and others several times" if is_stream and len(set(parts)) < len(parts) else ""
