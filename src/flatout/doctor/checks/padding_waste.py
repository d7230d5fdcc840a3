"""Check for sequences of unequal lengths that are padded to the longest of their batch."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import at, is_worth, lane, models, ms
from flatout.doctor.finding import Finding
from flatout.observe import Model, Observation

_MUCH = 0.3
"""Share of padding from which on it is reported: even batches of similar lengths have some."""


@check()
def look(observation: Observation) -> Findings:
    """Report models that spend much of their computation on padding."""
    trained = models(observation)
    if not any(model.inputs for model in trained):
        raise NoSignal("the inputs of the model were not observed")
    for model in trained:
        if model.padding_share is None or model.padding_share < _MUCH:
            continue
        # Attention costs the square of the length, so half the length saves three quarters.
        most = model.padding_share * (2 - model.padding_share)
        cost = most * lane(observation, "forward", "backward")
        if is_worth(observation, cost):
            yield _finding(observation, model, model.padding_share, cost)


def _finding(observation: Observation, model: Model, padding: float, cost: float) -> Finding:
    loaders = [loader.site for loader in observation.loaders if loader.in_training]
    to = "the longest of each batch" if model.lengths > 1 else "one length for all"
    return Finding(
        kind="slow",
        what=f"{padding:.0%} of the places in the model's inputs are padding, to {to}; forward and "
        f"backward spend up to {ms(cost)} on it",
        do="make batches of sequences of like lengths (a batch_sampler that sorts within large "
        "shuffled groups), each padded to its own longest; the order of the samples changes",
        where=at(loaders[0] if loaders else model.site),
        cost_ms=cost,
        parity="changes learning",
    )
