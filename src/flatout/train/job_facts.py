"""Facts that identify a job; a checkpoint stores them, and a resume compares them.

A fact is [words, digest]. The words are for people. The digest differs if equal words describe
different things.
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
from flatout.train.losses.losses import Loss
from flatout.train.several_losses import SeveralLosses

if TYPE_CHECKING:
    from flatout.train.losses.metrics import Metric

Facts = dict[str, list[str]]
# Digest of a value that was not read, so that only its words are compared.
UNREAD = "unread"


def fact(words: Any, digest: str = "") -> list[str]:
    """Return a fact of words for people, and a digest for things with the same words."""
    return [str(words), digest]


def compute_fact(compute: Callable[..., Any] | None) -> Facts:
    """Return the fact of a user's own loss function; empty for the Trainer's own."""
    if compute is None or is_library(getattr(compute, "__func__", compute)):
        return {}
    return {"compute": fact(words_of(compute), code_digest(compute))}


def losses_facts(loss: Loss | SeveralLosses) -> Facts:
    """Return the facts of the loss, or of each of several losses and their weights."""
    if not isinstance(loss, SeveralLosses):
        return {"loss": loss_fact(loss)}
    parts = {f"loss of {name!r}": loss_fact(value) for name, value in loss.parts.items()}
    weights = ", ".join(f"{name}: {weight:g}" for name, weight in loss.weights.items())
    return {**parts, "loss_weights": fact(weights)}


def loss_fact(loss: Loss) -> list[str]:
    """Return the loss's name, arguments and buffers, and a digest of the user's own code."""
    own: Any = loss.module if loss.own is None else loss.own
    if own is None:
        return fact(loss.name)
    if not isinstance(own, nn.Module):
        return fact(loss.name, code_digest(own))
    buffers = [f"{name} {content_digest(value)}" for name, value in own.named_buffers()]
    return fact(f"{loss.name}({arguments_words(own)})", digest_of(code_digest(own), *buffers))


def metrics_fact(metrics: dict[str, Metric]) -> list[str]:
    """Return the names of metrics, and a digest of the user's own code."""
    inner = {name: getattr(m, "_function", getattr(m, "_metric", m)) for name, m in metrics.items()}
    digest = digest_of(*(f"{name} {code_digest(value)}" for name, value in inner.items()))
    return fact(", ".join(metrics) or "none", digest)


def callback_facts(callbacks: Iterable[object]) -> Facts:
    """Return the classes of callbacks and their arguments."""
    callbacks = list(callbacks)
    kinds = ", ".join(type(callback).__qualname__ for callback in callbacks) or "none"
    facts = {"callbacks": fact(kinds)}
    for number, item in enumerate(callbacks, 1):
        words = arguments_words(item)
        facts[f"arguments of callback {number}, {type(item).__qualname__}"] = fact(words or "none")
        scored_by = getattr(item, "scored_by", None)
        if scored_by is not None:  # scores by different figures cannot be compared
            facts["what gives checkpoints their scores"] = fact(scored_by)
    return facts
