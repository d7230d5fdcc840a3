"""Check for recurrent layers or attention that run over samples instead of sequence positions."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, check
from flatout.doctor.checks.signals import at, models
from flatout.doctor.finding import Finding
from flatout.observe import Observation


@check(hooks=True)
def look(observation: Observation) -> Findings:
    """Report layers that run over the samples of a batch.

    Evidence is that the loader shuffles, or that the targets are the next tokens.
    """
    models(observation)
    told = set()
    for layer in observation.over_batch:
        if layer.site in told:  # the layers of an encoder are called on one line
            continue
        told.add(layer.site)
        samples, places = layer.shape[:2]
        known = (
            f"not over their {places} places, along which each target is the next input"
            if layer.by_targets
            else f"in the order that the loader has drawn, not over their {places} places"
        )
        yield Finding(
            kind="danger",
            what=f"{layer.kind} gets {layer.shape} and runs over its {samples} samples, {known}: "
            "an output depends on the other samples of the batch",
            do="batch_first=True where the layer is made",
            where=at(layer.site),
            parity="changes learning",
        )
