"""Comparison of gradients, dense and sparse."""

from __future__ import annotations

import torch

Gradients = list[torch.Tensor | None]
"""The gradients of a step; the first item is its loss."""


def summed(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Return a sparse gradient with one value per row; return others as they are."""
    return gradient.coalesce() if gradient is not None and gradient.is_sparse else gradient


def values_of(gradient: torch.Tensor) -> torch.Tensor:
    """Return the stored values of a gradient; of a dense gradient, the gradient itself."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def is_finite(gradient: torch.Tensor | None) -> bool:
    """Return whether a gradient has no NaN and no infinity."""
    return gradient is None or bool(values_of(gradient).isfinite().all())


def are_equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Return whether two gradients have the same values; sparse gradients may differ in layout."""
    if a is None or b is None:
        return a is b
    if a.is_sparse and b.is_sparse:
        return torch.equal(a.indices(), b.indices()) and torch.equal(a.values(), b.values())
    return torch.equal(*(g.to_dense() if g.is_sparse else g for g in (a, b)))


def difference(plain: Gradients, others: Gradients) -> float:
    """Return the norm of the gradients' difference, as a fraction of the plain gradients' norm.

    The first item of each list is the loss, which is not compared.
    """
    differing = norm = 0.0
    for a, b in zip(plain[1:], others[1:], strict=True):
        if a is None or b is None:
            if a is not b:
                return float("inf")
            continue
        if a.is_sparse != b.is_sparse:
            a, b = (g.to_dense() if g.is_sparse else g for g in (a, b))
        differing += float(values_of(a - b).norm()) ** 2
        norm += float(values_of(a).norm()) ** 2
    return (differing / norm) ** 0.5 if norm else 0.0 if not differing else float("inf")
