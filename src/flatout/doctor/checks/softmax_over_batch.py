"""Check for softmax over the samples of a batch."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, check
from flatout.doctor.checks.signals import at, models
from flatout.doctor.finding import Finding
from flatout.observe import Observation

# Minimum number of softmax calls over the batch, in the observed steps.
_CALLS = 2


@check(hooks=True)
def look(observation: Observation) -> Findings:
    """Report softmax over the first dimension, if that is the samples of a shuffled batch."""
    models(observation)
    for item in observation.softmaxes:
        if item.count >= _CALLS:
            yield Finding(
                kind="danger",
                what=f"{item.kind} of {item.shape} is taken over its first dimension, the "
                f"{item.shape[0]} samples of a batch, in the order that the loader has drawn: "
                "they add up to 1, and each depends on the others",
                do="dim=-1, or the dimension of the classes or places",
                where=at(item.site),
                parity="changes learning",
            )
