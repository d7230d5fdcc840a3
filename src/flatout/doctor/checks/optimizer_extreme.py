"""Check for a learning rate, momentum or decay with which training does not work."""

from __future__ import annotations

from collections.abc import Iterator

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import at
from flatout.doctor.finding import Finding
from flatout.observe import Observation, Optimizer

_KNOWN = ("torch.optim.", "keras.src.")
_ADAM = ("Adam", "AdamW", "NAdam", "Nadam", "RAdam", "Adamax")
_ADAM_RATE = 1.0
"""Largest rate of Adam: each step moves each weight by about the rate, and most are below 1."""

_SGD_RATE = 100.0
"""Largest rate of SGD: papers use rates of 30 for heads on normalized features."""

_WIPES = 1.0
"""Relative change of a matrix by the first step from which on its initial values are lost."""

_SHRINKS = 0.5
"""Share of a weight that decay removes in one step, from which on the decay is extreme."""


@check()
def look(observation: Observation) -> Findings:
    """Report extreme options of torch's and Keras' own optimizers in the observed steps."""
    known = [
        optimizer
        for optimizer in observation.optimizers
        if optimizer.options and optimizer.kind.startswith(_KNOWN)
    ]
    if not known:
        raise NoSignal("the options of the optimizer were not observed")
    for optimizer in known:
        for what in _extremes(optimizer):
            yield Finding(
                kind="danger",
                what=what,
                do="compare with the optimizer's page; try rates a factor of three apart",
                where=at(optimizer.site),
                parity="changes learning",
            )


def _extremes(optimizer: Optimizer) -> Iterator[str]:
    name = optimizer.kind.rpartition(".")[2]
    options = optimizer.options
    rate, decay = options.get("lr", 0.0), options.get("weight_decay", 0.0)
    rates = [item for _, item in optimizer.rates]
    if name in _ADAM and rate >= _ADAM_RATE:
        yield f"{name} with a rate of {rate:g}: each step moves each weight by about as much"
    if name == "SGD" and rate >= _SGD_RATE:
        yield f"SGD with a rate of {rate:g}"
    many, change = optimizer.first_change or (0, 0.0)
    if change >= _WIPES:
        at_rate = f", at a rate of {rate:g}" if "lr" in options else ""
        yield (
            f"the first step changed {many} matrices by {change:.1f} times their own size in the "
            f"median{at_rate}: what they were initialized to is gone"
        )
    if len(rates) > 1 and not any(rates) and optimizer.first_target is None:
        yield "the learning rate is zero in each step, and no scheduler raises it"
    if options.get("momentum", 0.0) >= 1:
        yield f"a momentum of {options['momentum']:g}: steps grow without end"
    is_squared = name != "Lion"  # both betas of Lion average the gradient
    if is_squared and options.get("beta1", 0.0) > options.get("beta2", 1.0):
        yield (
            f"betas ({options['beta1']:g}, {options['beta2']:g}): the gradient is averaged over "
            "more steps than its square, so that a step can be far larger than the rate"
        )
    if rate * decay >= _SHRINKS:
        yield (
            f"a decay of {decay:g} at a rate of {rate:g} takes {rate * decay:.0%} of each weight "
            "in each step"
        )
