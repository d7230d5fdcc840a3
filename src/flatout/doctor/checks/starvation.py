"""The model waits for its input."""

from __future__ import annotations

from flatout.doctor.checks.check import Check
from flatout.doctor.checks.signals import HUNGRY, at, hot, is_gpu, lane, ms, share, step_ms
from flatout.doctor.finding import Finding
from flatout.observe import Observation


def look(seen: Observation) -> list[Finding]:
    """Whether input takes more of a step than handing over a ready batch."""
    wait = lane(seen, "input")
    if share(seen, wait) < HUNGRY:
        return []
    loader = max(
        (loader for loader in seen.loaders if loader.in_training),
        key=lambda loader: loader.batches,
        default=None,
    )
    return [
        Finding(
            name="starvation",
            kind="slow",
            what=f"the {'GPU' if is_gpu(seen) else 'model'} waits for input: {ms(wait)} of a step "
            f"of {ms(step_ms(seen))} ({share(seen, wait):.0%})",
            do="make the line named here cheaper, share it among workers, or cache what it gives",
            number=1,
            where="" if loader is None else at(hot(loader)),
            cost_ms=wait,
            parity="bit-identical",
        )
    ]


CHECK = Check("starvation", (1,), look)
