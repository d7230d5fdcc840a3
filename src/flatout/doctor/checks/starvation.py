"""Check for models that wait for input."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, check
from flatout.doctor.checks.signals import HUNGRY, at, hot, is_gpu, lane, ms, share, whole_ms
from flatout.doctor.finding import Finding
from flatout.observe import Loader, Observation, Site

_FIRST_WORKERS = 4
"""Number of workers to suggest if there are no workers: each costs memory and a dataset copy."""


@check(lane="input")
def look(observation: Observation) -> Findings:
    """Report input that takes more of a step than passing on a ready batch."""
    wait = lane(observation, "input")
    if share(observation, wait) < HUNGRY:
        return
    loader = max(
        (loader for loader in observation.loaders if loader.in_training),
        key=lambda loader: loader.batches,
        default=None,
    )
    workers = 0 if loader is None else _more_workers(observation, loader)
    yield Finding(
        kind="slow",
        what=f"the {'GPU' if is_gpu(observation) else 'model'} waits for input: {ms(wait)} of a "
        f"step of {ms(whole_ms(observation))} ({share(observation, wait):.0%})",
        do="make the line named here cheaper, share it among workers, or cache what it gives",
        where=at(_made_in(observation) if loader is None else hot(loader)),
        cost_ms=wait,
        parity="redrawn" if workers else "bit-identical",
        recipe={"input.workers": workers} if workers else {},
    )


def _made_in(observation: Observation) -> Site | None:
    makes = [line for line in observation.lines if line.lanes_ms.get("input")]
    return max(makes, key=lambda line: line.lanes_ms["input"]).site if makes else None


def _more_workers(observation: Observation, loader: Loader) -> int:
    now = loader.num_workers
    if loader.is_iterable or now is None or not observation.usable_cpus:
        return 0
    free = observation.usable_cpus - 1
    if now and observation.runnable is not None:
        free = int(observation.usable_cpus * (1 - observation.runnable)) + now
    wanted = min(max(1, free), 2 * now if now else _FIRST_WORKERS)
    return wanted if wanted > now and observation.usable_cpus > 1 else 0
