"""Effects of a job's global batch size: the learning-rate rule, and warnings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flatout.data import Source
from flatout.errors import ModelError
from flatout.optim import LrRule, LrScale, optimizer_adapter, rates_of, warnings_of


def scale_rates(
    rule: LrRule | None,
    optimizers: Sequence[torch.optim.Optimizer],
    data: Source | None,
    first_batch: int | None,
    accumulate: int,
    *,
    scheduled: bool,
    own_batches: bool = False,
) -> tuple[LrScale | None, list[str]]:
    """Return the factors of the rule for this job, and lines for the user."""
    size = None if data is None or own_batches else data.batch_size
    size = size or first_batch
    batch = None if size is None else size * accumulate
    steps = None if data is None or data.steps is None else -(-data.steps // accumulate)
    if len(optimizers) > 1:
        steps = None  # the user's loop decides which optimizer steps on a batch
    first = optimizer_adapter(optimizers[0])
    # Keras may combine batches for an update; a warm-up still counts Flatout's steps.
    together = first.batches_per_update
    batch = None if batch is None else batch * together
    updates = None if steps is None else -(-steps // together)
    scheduled = scheduled or first.is_scheduled
    scale, words = None, []
    if rule is not None:
        if batch is None:
            raise ModelError(
                "a learning-rate rule needs the batch size, which is not known here",
                do="give prepare both compute and data",
            )
        scale = rule.for_batch(batch, steps)
        words.append(scale.words(rates_of(optimizers), scheduled=scheduled))
    warnings = [
        w for optimizer in optimizers for w in warnings_of(optimizer, scale, batch, updates)
    ]
    return scale, words + list(dict.fromkeys(warnings))


def resumed_words(scale: LrScale, step: int) -> str:
    """Report that the rule continues after a resume."""
    done = (
        f"the learning rate stays multiplied by {scale.at(step):.4g}: {scale.rule.rule} rule for "
        "batch "
    )
    done += f"{scale.batch:,} instead of {scale.rule.reference_batch:,}"
    if step < scale.warm_up_steps:
        done += f", step {step:,} of {scale.warm_up_steps:,} of the warm-up"
    return done


def as_saved(rule: LrRule | None) -> dict[str, Any] | None:
    """Return the rule in the form of a checkpoint; None for a rule without effect."""
    return None if rule is None or rule.rule == "none" else rule.as_dict()


def as_rule(given: Any) -> LrRule | None:
    """Check and return the user's `lr_rule`."""
    if given is None or isinstance(given, LrRule):
        return given
    raise ModelError(
        f"an lr_rule is a flatout.LrRule, found {given!r}",
        do="LrRule('linear', reference_batch=256), with the batch that the rate was found with",
    )
