"""Check for mean losses of several batches that are summed but not divided by their number."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import at, in_losses
from flatout.doctor.finding import Finding
from flatout.observe import Observation, Optimizer

_SCALED = ("SGD", "ASGD", "LBFGS")
"""Optimizers whose step scales with the gradient; steps of Adam and similar optimizers do not."""

_DECOUPLED = ("AdamW",)
"""Optimizers whose weight decay is not part of the gradient."""

_SHARED = ("DistributedDataParallel", "FullyShardedDataParallel")
"""Wrappers that change gradients in each backward pass."""


@check(hooks=True)
def look(observation: Observation) -> Findings:
    """Report mean losses that were added up over batches of the loader."""
    losses = list(in_losses(observation, "undivided"))
    shared = {model.wrapper for model in observation.models} & {*_SHARED}
    if not losses and shared and any(item.backwards > 1 for item in observation.optimizers):
        raise NoSignal(
            f"{min(shared)} changes gradients itself: a division of gradients by the script cannot "
            "be detected"
        )
    for loss in losses:
        many = loss.detail["backwards"]
        optimizer = next(iter(observation.optimizers), None)
        name = "" if optimizer is None else optimizer.kind.rpartition(".")[2]
        is_scaled = name in _SCALED
        more = "" if is_scaled else _left_of_it(observation, optimizer, name, many)
        yield Finding(
            kind="danger" if is_scaled else "note",
            what=f"{many} losses that are means are added up, undivided: the gradient of a step is "
            f"{many} times that of their mean{more}",
            do=f"(loss / {many}).backward(), so that the rate means the same as without "
            "accumulation",
            where=at(None if optimizer is None else optimizer.backward_site or optimizer.site),
            parity="changes learning",
        )


def _left_of_it(observation: Observation, optimizer: Optimizer | None, name: str, many: int) -> str:
    parts = []
    if any(call.kind == "clip" for call in observation.calls):
        parts.append(f"it is clipped as if at 1/{many} of the limit")
    is_torchs = optimizer is not None and optimizer.kind.startswith("torch.optim.")
    is_coupled = is_torchs and name not in _DECOUPLED  # Keras' weight decay never is
    if optimizer and optimizer.options.get("weight_decay") and is_coupled:
        parts.append(f"decay counts 1/{many}")
    return f"; {name or 'the optimizer'} divides that out" + (
        f", but {' and '.join(parts)}" if parts else " but for its eps"
    )
