"""Check for parameters of an optimizer that the loss never reaches."""

from __future__ import annotations

from itertools import chain

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import at, few
from flatout.doctor.finding import Finding
from flatout.observe import Observation, Optimizer

_LOOKS = 6
"""Minimum number of steps without a gradient: a rarely trained head may get a gradient later."""


@check()
def look(observation: Observation) -> Findings:
    """Report trainable tensors of an optimizer that had no gradient after any checked step.

    It is a danger if front layers are called with gradients and all later layers learn: then the
    graph was cut after the front layers. It is a danger too if layers in train mode are always
    called under no_grad, or if an optimizer steps without any gradient. Layers at the end may be
    unused on purpose.
    """
    idle = [optimizer for optimizer in observation.optimizers if _has_none(optimizer)]
    known = [
        optimizer for optimizer in observation.optimizers if optimizer.gradient_looks >= _LOOKS
    ]
    findings = [*map(_of_none, idle), *chain.from_iterable(map(_of_some, known))]
    if not findings and len(known) < max(1, len(observation.optimizers)):
        raise NoSignal(f"gradients were checked after fewer than {_LOOKS} steps")
    return findings


def _of_some(optimizer: Optimizer) -> Findings:
    if optimizer.cut:
        yield _cut(optimizer)
    elif optimizer.without_grad:
        yield _without_grad(optimizer)
    elif optimizer.unreached or optimizer.orphans:
        yield _unreached(optimizer)


def _has_none(optimizer: Optimizer) -> bool:
    without, of = optimizer.steps_without or (0, 0)
    return without == of >= _LOOKS and not optimizer.gradient_looks


def _of_none(optimizer: Optimizer) -> Finding:
    _, of = optimizer.steps_without or (0, 0)
    return Finding(
        kind="danger",
        what=f"none of this optimizer's {optimizer.parameters} parameters has a gradient before "
        f"any of the {of} steps that were checked: they stay as they are",
        do="look between their model and its loss for no_grad(), detach(), .data or numpy(); or "
        "for a zero_grad() between backward and step",
        where=at(optimizer.site),
        parity="changes learning",
    )


def _cut(optimizer: Optimizer) -> Finding:
    names = optimizer.cut
    return Finding(
        kind="danger",
        what=f"the loss never reaches the first {len(names)} parameters of the model, though their "
        f"layers are called and the optimizer holds them: {few(names)}",
        do="look between these layers and the next for detach(), .data, numpy() or torch.tensor(), "
        "which cut the graph",
        where=at(optimizer.site),
        parity="changes learning",
    )


def _without_grad(optimizer: Optimizer) -> Finding:
    names = optimizer.without_grad
    site = optimizer.no_grad_site
    return Finding(
        kind="danger",
        what="gradients are switched off here for layers in train mode that the optimizer holds: "
        f"{len(names)} parameters had no gradient in all {optimizer.gradient_looks} steps "
        f"that were checked: {few(names)}",
        do="call them outside of no_grad; or, where they are meant to stay, put them into eval() "
        "and leave them out of the optimizer",
        where=at(site or optimizer.site),
        parity="changes learning",
    )


def _unreached(optimizer: Optimizer) -> Finding:
    names = optimizer.unreached + [f"a tensor {shape}" for shape in optimizer.orphans]
    return Finding(
        kind="note",
        what=f"the optimizer holds {len(names)} parameters without a gradient in all "
        f"{optimizer.gradient_looks} steps that were checked: {few(names)}",
        do="nothing where they are meant to stay, as an unused head; else see that what they "
        "compute enters the loss",
        where=at(optimizer.site),
        parity="bit-identical",
    )
