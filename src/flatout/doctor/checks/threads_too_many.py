"""Check for more threads of all ranks together than CPUs."""

from __future__ import annotations

from collections.abc import Sequence

from flatout.doctor.checks.check import Findings, rank_check
from flatout.doctor.checks.signals import threads_and_cpus
from flatout.doctor.edits import arguments
from flatout.doctor.finding import Finding
from flatout.observe import Observation


@rank_check(edit=arguments.threads)
def look(observations: Sequence[Observation]) -> Findings:
    """Report that torch's threads of all ranks exceed the CPUs of this machine."""
    threads, cpus = threads_and_cpus(observations)
    if sum(threads) <= cpus or max(threads) == 1:
        return
    wanted = max(1, cpus // len(observations))
    in_all = (
        f"{len(observations)} ranks x {max(threads)}" if len(observations) > 1 else f"{threads[0]}"
    )
    yield Finding(
        kind="slow",
        what=f"{in_all} threads on {cpus} usable CPUs: they wait for one another",
        do=f"OMP_NUM_THREADS={wanted}; flatout run --devices auto finds how many ranks are fastest",
        where=_where(observations),
        parity="rounding",
        recipe={"process.threads": wanted},
    )


def _where(observations: Sequence[Observation]) -> str:
    asked = [call.site for rank in observations for call in rank.calls if call.kind == "threads"]
    return str(asked[-1]) if asked else ""
