"""The model's outputs for every sample, in order."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, Protocol

import torch

from flatout.data import (
    Batch,
    Source,
    differs_by_rank,
    map_tensors,
    rows_of_samples,
    tensors_in,
)
from flatout.errors import DataError, ModelError
from flatout.train import guard
from flatout.train.checks import explained
from flatout.train.evaluate import Evaluated, Watched, as_one_graph, at_the_fastest_size, evaluating
from flatout.train.loop import Loop
from flatout.train.ranks import part_of
from flatout.train.tables.tables import explain_ids, ids_checked_in_evaluation
from flatout.world import ONE


class Predicted(Evaluated, Protocol):
    """The part of an Objective that a prediction uses."""

    @property
    def predicts_as_written(self) -> bool:
        """Whether a prediction calls a step that the model's class overrides."""

    def predicted(self, batch: Batch, loop: Loop) -> Any:
        """Return the outputs of a batch that a prediction keeps."""


def predict(
    objective: Predicted,
    loop: Loop,
    source: Source,
    watched: Watched = lambda batches, read: batches,
) -> Any:
    """Return all outputs joined along the first dimension, on the CPU; half precision as fp32.

    The outputs of padding rows are left out. With several ranks, each rank computes its part of
    every batch, and all ranks get the whole result.
    """
    guard.check_state(objective.model, "prediction")
    loop.be_ready(objective.model)
    world = loop.world
    own_rows = differs_by_rank(source)
    if world.size > 1 and own_rows:
        raise DataError(
            "predictions come in the order of the samples, and ranks with their own samples "
            "have no common order",
            do="leave shard out and read files: each rank predicts its share of every batch",
        )

    checked = ids_checked_in_evaluation(objective.model, source)

    def take(batch: Batch) -> Any:
        with checked(batch):
            output = objective.predicted(batch, loop)
        _check(output)
        size = batch.size
        if batch.is_jagged and batch.targets is None:  # only outputs show the number of samples
            size = next((len(t) for t in tensors_in(output) if t.dim()), size)
        return rows_of_samples(map_tensors(partial(_to_host, size), output), batch)

    outputs: list[Any] = []
    if objective.predicts_as_written:  # an overridden step may need all samples of a batch
        part, world = source, ONE
    else:
        part = part_of(source, world, loop.say, whole=loop.takes_whole_batches, use="predict")
    graph = as_one_graph(objective, loop, source)
    with (
        loop.feed.evaluated(source, part) as made,
        evaluating(objective.model),
        loop.autocast(),
        graph,
    ):
        batches: Iterable[Batch] = watched(made, lambda: _joined(outputs[-1] or [None]))
        if not objective.adapter.is_compiled:
            batches = at_the_fastest_size(objective, loop, source, batches)
        for batch in batches:
            batch = loop.ready(batch)
            with explained(objective.model, batch):
                try:
                    result = loop.evaluation.in_pieces(take, batch, whole=loop.meets_in_compute)
                except (IndexError, RuntimeError) as error:
                    explain_ids(error, objective.model, [batch], take, source)
                    raise
            outputs.append(None if batch.is_copy else result)
    loop.tell_skipped(source)
    # The outputs are ordered by batch, and within a batch by rank, which is the order of the
    # samples.
    by_batch = zip(*world.gather(outputs), strict=True)
    return _joined([kept for ranks in by_batch for part in ranks for kept in part or ()])


def _check(output: Any) -> None:
    """Refuse outputs that `map_tensors` would take for a tuple, or iterate over forever."""
    if isinstance(output, (dict, tuple, list)):
        for part in output.values() if isinstance(output, dict) else output:
            _check(part)
    elif output is not None and not torch.is_tensor(output):
        raise ModelError(f"the model returns a {type(output).__name__}, where a tensor is expected")


def _to_host(size: int, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() == 0 or len(tensor) != size:
        raise ModelError(
            f"the model returns a tensor of shape {tuple(tensor.shape)} for {size} samples",
            do="let it return one row per sample in evaluation mode",
        )
    half = tensor.dtype in (torch.bfloat16, torch.float16)
    # A copy, because a view would keep the activations that it is a view of.
    return tensor.to("cpu", torch.float32 if half else tensor.dtype, copy=True)


def _joined(parts: list[Any]) -> Any:
    first = parts[0]
    if torch.is_tensor(first):
        other = next((part for part in parts if part.shape[1:] != first.shape[1:]), None)
        if other is not None:
            raise ModelError(
                f"a sample's output has the shape {tuple(first.shape[1:])} in the first batch and "
                f"{tuple(other.shape[1:])} in a later one, but predictions must be one tensor",
                do="pad all batches to one length, such as in the collate function of a DataLoader",
            )
        return torch.cat(parts)
    if first is None:
        return None
    if isinstance(first, dict):
        return {key: _joined([part[key] for part in parts]) for key in first}
    return tuple(_joined([part[i] for part in parts]) for i in range(len(first)))
