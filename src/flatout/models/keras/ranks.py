"""Losses and metrics of a compiled Keras model when a batch is split among several ranks.

A Keras loss is a mean over its inputs. Weighting the mean of each part by its number of samples
gives the mean of the whole batch if all samples have equal weight. This is not so with masks,
`ignore_class`, "mean_with_sample_weight" or "sum". Then each rank's value is first scaled so that
the weighted mean over ranks is the value that a single rank would compute for the whole batch.

Keras' metrics add up sums over samples. Each rank updates its own metrics, and a read adds up the
sums of all ranks. A metric of the user's own may do anything with a batch, so every rank gives it
the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from flatout.data import Batch, map_tensors
from flatout.world import World


@contextmanager
def shared_losses(world: World, batch: Batch) -> Iterator[None]:
    """Within this context, scale Keras losses so that their weighted mean is the batch's loss."""
    if world.size == 1 or batch.copies > 1:  # a copy is the whole batch
        yield
        return
    from keras.src.losses import loss as module

    plain = module.reduce_weighted_values

    def reduce(
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: str | None = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        value = plain(values, sample_weight, mask, reduction, dtype)
        if not values.shape or reduction in (None, "none"):
            return value
        if reduction == "sum":
            return value * _share(world, batch.samples, None)
        if reduction != "mean_with_sample_weight":
            sample_weight = None  # divides by the number of samples, whatever their weights
        if mask is None and sample_weight is None:
            return value
        # A copy, because Keras multiplies by the mask in place.
        weight = None if sample_weight is None else sample_weight.clone()
        counted = module.apply_mask(weight, mask, dtype=value.dtype, reduction="sum")
        # A rank's part that has only padding rows has weight 0.
        return value * _share(world, batch.samples, counted.sum() * bool(batch.samples))

    module.reduce_weighted_values = reduce
    try:
        yield
    finally:
        module.reduce_weighted_values = plain


@torch.no_grad()
def _share(world: World, size: int, counted: torch.Tensor | None) -> torch.Tensor:
    device = None if counted is None else counted.device
    both = torch.tensor([float(size), 0.0], dtype=torch.float64, device=device)
    if counted is not None:
        both[1] = counted
    world.sum(both)
    share: torch.Tensor = both[0] / max(1, size)
    if counted is None:
        return share.float()
    return (share * counted / both[1].clamp_min(1e-12)).to(counted.dtype)


@contextmanager
def over_all(variables: Sequence[Any], world: World) -> Iterator[None]:
    """Within this context, set these metric variables to the sums over all ranks."""
    variables = list({id(variable): variable for variable in variables}.values())
    if world.size == 1 or not variables:
        yield
        return
    with torch.no_grad():
        own = [variable.value.clone() for variable in variables]
        # Counts of whole numbers are exact in float64.
        sums = torch.cat([value.double().reshape(-1) for value in own])
        world.sum(sums)
        parts = torch.split(sums, [value.numel() for value in own])
        for variable, part in zip(variables, parts, strict=True):
            variable.value.copy_(part.view_as(variable.value))
    try:
        yield
    finally:
        put_back(variables, own)


@torch.no_grad()
def put_back(variables: Sequence[Any], values: Sequence[torch.Tensor]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.value.copy_(value)


def whole_batch(world: World, given: Any) -> Any:
    """Return tensors with a row for each sample, and their masks, joined over all ranks."""
    own = map_tensors(_on_host, given)
    parts = world.gather(own)
    return _joined(given, parts)


def _on_host(tensor: torch.Tensor) -> dict[str, Any]:
    mask = getattr(tensor, "_keras_mask", None)
    return {"rows": tensor.detach().cpu(), "mask": None if mask is None else mask.cpu()}


def _joined(like: Any, parts: Sequence[Any]) -> Any:
    if like is None:
        return None
    if isinstance(like, dict):
        return {key: _joined(part, [p[key] for p in parts]) for key, part in like.items()}
    if not torch.is_tensor(like):
        return tuple(_joined(part, [p[n] for p in parts]) for n, part in enumerate(like))
    rows = torch.cat([part["rows"] for part in parts]).to(like.device)
    if parts[0]["mask"] is not None:
        rows._keras_mask = torch.cat([p["mask"] for p in parts]).to(like.device)  # type: ignore[attr-defined]
    return rows


def adds_up(metric: Any) -> bool:
    """Return whether a metric's variables are sums over samples: Keras' metric and function.

    A function of the user's own may return one number for a batch, and so may a loss object.
    """
    function = getattr(metric, "_fn", None)
    if not type(metric).__module__.startswith("keras."):
        return False
    return function is None or (
        getattr(function, "__module__", "").startswith("keras.") and hasattr(function, "__name__")
    )
