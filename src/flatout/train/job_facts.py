"""What identifies a job, in words that a checkpoint keeps and a resume compares.

A fact is [words, digest]: for people, and what differs where the words do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torch import nn

from flatout.data import (
    arguments_words,
    code_digest,
    content_digest,
    digest_of,
    is_library,
    words_of,
)
from flatout.train.losses import Loss
from flatout.train.several_losses import SeveralLosses

if TYPE_CHECKING:
    from flatout.train.metrics import Metric

Facts = dict[str, list[str]]
# The digest of what was not read: the words alone show.
UNREAD = "unread"


def fact(words: Any, digest: str = "") -> list[str]:
    """Words for people, and a digest where other things may have the same words."""
    return [str(words), digest]


def compute_fact(compute: Callable[..., Any] | None) -> Facts:
    """What a user's own loop computes; a Trainer's loss is told by the Trainer."""
    if compute is None or is_library(getattr(compute, "__func__", compute)):
        return {}
    return {"compute": fact(words_of(compute), code_digest(compute))}


def losses_facts(loss: Loss | SeveralLosses) -> Facts:
    """The loss, or each of several, with what they are multiplied by."""
    if not isinstance(loss, SeveralLosses):
        return {"loss": loss_fact(loss)}
    parts = {f"loss of {name!r}": loss_fact(value) for name, value in loss.parts.items()}
    weights = ", ".join(f"{name}: {weight:g}" for name, weight in loss.weights.items())
    return {**parts, "loss_weights": fact(weights)}


def loss_fact(loss: Loss) -> list[str]:
    """What a loss is called, its arguments and buffers, and its code where that is the user's."""
    own: Any = loss.module if loss.own is None else loss.own
    if own is None:
        return fact(loss.name)
    if not isinstance(own, nn.Module):
        return fact(loss.name, code_digest(own))
    buffers = [f"{name} {content_digest(value)}" for name, value in own.named_buffers()]
    return fact(f"{loss.name}({arguments_words(own)})", digest_of(code_digest(own), *buffers))


def metrics_fact(metrics: dict[str, Metric]) -> list[str]:
    """Their names, and their code where that is the user's."""
    inner = {name: getattr(m, "_function", getattr(m, "_metric", m)) for name, m in metrics.items()}
    digest = digest_of(*(f"{name} {code_digest(value)}" for name, value in inner.items()))
    return fact(", ".join(metrics) or "none", digest)


def callback_facts(callbacks: Iterable[object]) -> Facts:
    """Which callbacks there are, and what each was made with."""
    callbacks = list(callbacks)
    kinds = ", ".join(type(callback).__qualname__ for callback in callbacks) or "none"
    facts = {"callbacks": fact(kinds)}
    for number, item in enumerate(callbacks, 1):
        words = arguments_words(item)
        facts[f"arguments of callback {number}, {type(item).__qualname__}"] = fact(words or "none")
        scored_by = getattr(item, "scored_by", None)
        if scored_by is not None:  # scores of two figures cannot be compared
            facts["what gives checkpoints their scores"] = fact(scored_by)
    return facts
