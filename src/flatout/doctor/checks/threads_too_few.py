"""The ranks' threads leave most CPUs idle."""

from __future__ import annotations

from collections.abc import Sequence

from flatout.doctor.checks.check import Findings, rank_check
from flatout.doctor.checks.signals import is_gpu, threads_and_cpus
from flatout.doctor.finding import Finding
from flatout.observe import Observation

_IDLE = 0.5
"""Share of the CPUs below which threads are too few. Half can be meant: loader workers need some,
and two threads of one core share its units."""


@rank_check()
def look(observations: Sequence[Observation]) -> Findings:
    """Whether a job on the CPU uses less than half of it. A GPU's rank only calls kernels."""
    threads, cpus = threads_and_cpus(observations)
    if is_gpu(observations[0]) or sum(threads) >= _IDLE * cpus:
        return
    wanted = max(1, cpus // len(observations))
    in_all = (
        f"{len(observations)} ranks x {max(threads)}" if len(observations) > 1 else f"{threads[0]}"
    )
    sites = [str(call.site) for call in observations[0].calls if call.kind == "threads"]
    is_own = not sites and max(threads) == 1
    why = "; torchrun sets OMP_NUM_THREADS=1 by itself" if is_own else ""
    yield Finding(
        kind="slow",
        what=f"{in_all} threads on {cpus} usable CPUs leave most of them idle{why}",
        do=f"OMP_NUM_THREADS={wanted}; flatout run --devices auto finds how many ranks are fastest",
        parity="rounding",
        where=sites[0] if sites else "",
        recipe={"process.threads": wanted},
    )
