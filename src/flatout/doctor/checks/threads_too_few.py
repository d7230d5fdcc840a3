"""Check for CPUs that the ranks' threads leave idle."""

from __future__ import annotations

from collections.abc import Sequence

from flatout.doctor.checks.check import Findings, NoSignal, rank_check
from flatout.doctor.checks.signals import (
    SLOW_RATE,
    arithmetic_rate,
    is_gpu,
    kind_of,
    lane,
    threads_and_cpus,
)
from flatout.doctor.edits import arguments
from flatout.doctor.finding import Finding
from flatout.observe import Observation

_IDLE = 0.5
"""Share of the CPUs below which threads are too few.

Using half of the CPUs may be intended: workers need some, and two threads of a core share units. A
script that sets a single thread, without workers or other computing processes, has no such reason.
"""

_OTHERS = 0.5
"""Median number of running threads other than torch's from which on other threads compute."""


@rank_check(edit=arguments.threads)
def look(observations: Sequence[Observation]) -> Findings:
    """Report a job on the CPU that leaves CPUs idle. A rank on a GPU only calls kernels."""
    threads, cpus = threads_and_cpus(observations)
    first = observations[0]
    sites = [str(call.site) for call in first.calls if call.kind == "threads"]
    is_one = bool(sites) and max(threads) == 1 and not _have_workers(observations)
    if is_gpu(first) or sum(threads) >= (1.0 if is_one else _IDLE) * cpus:
        return
    wanted = max(1, cpus // len(observations))
    in_all = (
        f"{len(observations)} ranks x {max(threads)}" if len(observations) > 1 else f"{threads[0]}"
    )
    is_own = not sites and max(threads) == 1
    why = "; torchrun sets OMP_NUM_THREADS=1 by itself" if is_own else ""
    is_small = _is_of_small_operators(first)
    most = None if is_small else _most(observations, sum(threads) / cpus)
    why += "; its operators are too small to be shared among them" if is_small else ""
    yield Finding(
        kind="note" if is_small else kind_of(first, most),
        what=f"{in_all} thread{'s' if sum(threads) > 1 else ''} of the {cpus} that could run at "
        f"once: the other CPUs are idle{why}",
        do=f"OMP_NUM_THREADS={wanted}; flatout run --devices auto finds how many ranks are fastest",
        parity="rounding",
        where=sites[-1] if sites else "",
        cost_ms=most,
        recipe={"process.threads": wanted},
    )


def _have_workers(observations: Sequence[Observation]) -> bool:
    return any(loader.num_workers for rank in observations for loader in rank.loaders) or any(
        (rank.runnable or 0.0) * (rank.usable_cpus or 1) > (rank.threads or 1) + _OTHERS
        for rank in observations
    )


def _most(observations: Sequence[Observation], used: float) -> float | None:
    try:
        computed = [lane(rank, "forward", "backward", "optimizer") for rank in observations]
    except NoSignal:
        return None
    return (1 - used) * max(computed)


def _is_of_small_operators(observation: Observation) -> bool:
    try:
        rates = [arithmetic_rate(observation, model) for model in observation.models]
    except NoSignal:
        return False
    return bool(rates) and all(rate is not None and rate < SLOW_RATE for rate in rates)
