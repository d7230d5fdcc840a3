"""Check for batches that do not divide evenly over the devices, in each step."""

from __future__ import annotations

from collections.abc import Sequence

from flatout.doctor.checks.check import Findings, NoSignal, rank_check
from flatout.doctor.checks.signals import at, models, samples_per_call
from flatout.doctor.finding import Finding
from flatout.observe import Observation, Site

_UNEVEN = 1.1
"""Smallest ratio of the largest part to the smallest that is reported."""


@rank_check()
def look(observations: Sequence[Observation]) -> Findings:
    """Report that the devices or ranks get parts of different sizes."""
    first = observations[0]
    wrapped = [model for model in models(first) if model.wrapper == "DataParallel"]
    if wrapped:
        devices = wrapped[0].wrapper_options.get("devices")
        size = samples_per_call(first)
        if devices is None or size is None:
            raise NoSignal("the samples that DataParallel gives each GPU were not observed")
        part = -(-size // max(1, devices))
        parts = [min(part, size - start) for start in range(0, size, part)]
        parts += [0] * (devices - len(parts))
        return _finding(parts, wrapped[0].site, "GPUs")
    if len(observations) == 1:
        return []
    if not all(rank.models and rank.models[0].wrapper for rank in observations):
        raise NoSignal("the way in which ranks add up their gradients was not observed")
    sizes = [samples_per_call(rank) for rank in observations]
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes):
        raise NoSignal("the sizes of the ranks' batches vary, or were not observed")
    return _finding(known, first.models[0].site, "ranks")


def _finding(parts: list[int], site: Site | None, owners: str) -> Findings:
    least, most = min(parts), max(parts)
    if not parts or most < _UNEVEN * least or most == least:
        return
    if least:
        idle = (
            f"the {owners} with fewer samples wait, and each of their samples weighs "
            f"{most / least:.2g} times as much"
        )
    else:
        idle = f"{parts.count(0)} of the {owners} get no samples"
    skew = idle if owners == "ranks" or not least else f"the {owners} with fewer samples wait"
    yield Finding(
        kind="note",
        what=f"the {owners} get {', '.join(map(str, parts))} samples of a batch: {skew}",
        do=f"a batch that is a multiple of {len(parts)}; else weigh each loss by its share "
        "of the samples",
        where=at(site),
        parity="changes learning",
    )
