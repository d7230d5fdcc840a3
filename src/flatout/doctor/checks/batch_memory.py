"""Check for batches far smaller than memory allows, or too large for it."""

from __future__ import annotations

import re

from flatout.doctor.checks.check import NoSignal, check
from flatout.doctor.checks.signals import at, is_gpu, made
from flatout.doctor.finding import Finding, Kind
from flatout.observe import Observation, is_users
from flatout.words import rounded

_OUT = re.compile(r"out of memory|can't allocate memory|Unable to allocate|^MemoryError", re.M)
"""Messages of torch, numpy and Python when memory runs out."""

_PLACE = re.compile(r'File "([^"]+)", line (\d+)')

_ROOM = 4.0
"""Smallest factor of batch growth that is reported: free memory alone is no problem."""

_SWAPPED_MB = 64.0
"""Largest megabytes in swap that may be only unused memory, which the kernel has moved out."""

_SMALLER = (
    "a smaller batch with gradients accumulated over several, activation checkpointing "
    "(torch.utils.checkpoint), or bf16"
)


@check()
def look(observation: Observation) -> list[Finding]:
    """Report that memory ran out; on a GPU, also how much larger a batch could be."""
    if observation.ended == "failed" and _OUT.search(observation.error):
        last = next(line for line in reversed(observation.error.splitlines()) if line.strip())
        return [
            _finding(
                "danger", f"memory ran out: {last.strip()[:200]}", _SMALLER, _line(observation)
            )
        ]
    if is_gpu(observation):
        return _on_gpu(observation)
    if observation.swapped_mb is None:
        raise NoSignal("the job's memory in swap was not observed")
    if observation.swapped_mb < _SWAPPED_MB:
        return []
    faults = (
        f", {rounded(observation.major_faults, 2)} pages a step are read back"
        if observation.major_faults
        else ""
    )
    what = f"{observation.swapped_mb:,.0f} MB of the job lie in swap{faults}"
    return [_finding("slow", what, f"fewer loader workers, or {_SMALLER}", _site(observation))]


def _on_gpu(observation: Observation) -> list[Finding]:
    memory_mb, peak, total = (
        observation.device_held_mb,
        observation.device_peak_mb,
        observation.device_total_mb,
    )
    if memory_mb is None or peak is None or total is None:
        raise NoSignal("the GPU's memory was not observed")
    if observation.device_failures:
        what = (
            f"the GPU's memory ran out {observation.device_failures} times, and the script went on"
        )
        return [
            _finding("danger", f"{what}: those batches may be lost", _SMALLER, _site(observation))
        ]
    if peak <= memory_mb:
        raise NoSignal("the GPU memory of a batch was not observed")
    times = (total - memory_mb) / (peak - memory_mb)
    if times < _ROOM:
        return []
    return [
        _finding(
            "note",
            f"a batch takes {peak - memory_mb:,.0f} MB of the GPU's {total:,.0f} MB: one about "
            f"{times:.0f} times as large would fit",
            "where samples per second still rise, a larger batch, with a learning rate for it",
            _site(observation),
            "changes learning",
        )
    ]


def _finding(kind: Kind, what: str, do: str, where: str, parity: str = "rounding") -> Finding:
    return Finding(kind=kind, what=what, do=do, where=where, parity=parity)


def _site(observation: Observation) -> str:
    loaders = [made(loader) for loader in observation.loaders if loader.in_training]
    models = [model.site for model in observation.models]
    return at(next((site for site in (*loaders, *models) if site is not None), None))


def _line(observation: Observation) -> str:
    own = [f"{file}:{line}" for file, line in _PLACE.findall(observation.error) if is_users(file)]
    return own[-1] if own else _site(observation)
