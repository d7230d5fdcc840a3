"""Ids that an embedding table has no row for, by table, id, column, sample, file and line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from flatout.data.batch import Batch, named_tensors
from flatout.data.pipeline import Pipeline
from flatout.data.source import Source
from flatout.errors import DataError, FlatoutError
from flatout.models import own_names
from flatout.models.keras_model import is_keras, modules_of
from flatout.train.micro_batch import is_out_of_memory
from flatout.train.snapshot import untouched


@contextmanager
def ids_checked(model: nn.Module, batch: Batch, source: Source | None) -> Iterator[None]:
    """Within, each embedding table looks at its ids before it is read; waits for the device.

    Args:
        model: of torch or Keras.
        batch: that is computed.
        source: where its samples come from, to name file and line; or None.

    Raises:
        DataError: an id is outside of a table.
    """
    handles = []
    found: list[DataError] = []
    for name, table, size in _tables(model):

        def look(_: Any, args: Any, kwargs: Any, name: str = name, size: int = size) -> None:
            given = [*args, *kwargs.values()]
            if given and torch.is_tensor(given[0]):
                try:
                    _check(name, size, given, batch, source)
                except DataError as error:
                    found.append(error)
                    raise

        handles.append(table.register_forward_pre_hook(look, with_kwargs=True))
    try:
        yield
    except Exception:
        if found:  # Keras would wrap it into words of its own
            raise found[0] from None
        raise
    finally:
        for handle in handles:
            handle.remove()


def outside(
    error: Exception,
    model: nn.Module,
    batches: Sequence[Batch],
    compute: Callable[[Batch], object],
    source: Source | None,
) -> DataError | None:
    """The id outside of a table that made this error; None where another thing did.

    Computes the batches once more, without a trace.
    """
    if isinstance(error, FlatoutError) or is_out_of_memory(error) or not any(_tables(model)):
        return None
    for batch in batches:
        try:
            with untouched(model), torch.no_grad(), ids_checked(model, batch, source):
                compute(batch)
        except DataError as found:
            return found
        except Exception:
            return None
    return None


def _tables(model: nn.Module) -> Iterator[tuple[str, nn.Module, int]]:
    """Name, module and rows of each embedding table."""
    if is_keras(model):
        for module in modules_of(model):
            kind = next((k for k in type(module).__mro__ if k.__name__ == "Embedding"), None)
            if kind is not None and kind.__module__.startswith("keras."):
                yield module.name, module, module.input_dim
        return
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    ]
    own = own_names(model, [name for name, _ in found])
    for name, module in found:
        yield own[name], module, module.num_embeddings


def _check(name: str, size: int, given: list[Any], batch: Batch, source: Source | None) -> None:
    ids = given[0].detach()
    bad = (ids < 0) | (ids >= size)
    if not ids.numel() or not bool(bad.any()):
        return
    at = bad.nonzero()[0].tolist()
    row, place = _row(given, at, batch)
    where = _column(ids, at, row, place, batch)
    if row is not None:
        where += f", {_sample(row, batch, source)}"
    raise DataError(
        f"id {int(ids[tuple(at)])} is not in 0..{size - 1}, the rows of the embedding table {name}",
        where=where,
        do="give the table as many rows as there are ids, or map unknown ids to a row of their own",
    )


def _row(given: list[Any], at: list[int], batch: Batch) -> tuple[int | None, list[int]]:
    """The row of the batch that holds the id, and the id's place in it."""
    ids = given[0]
    if len(ids) == batch.size:
        return at[0], at[1:]
    offsets = given[1] if len(given) > 1 else None
    if ids.dim() == 1 and torch.is_tensor(offsets) and len(offsets) == batch.size:
        row = int((offsets <= at[0]).sum()) - 1
        return row, [at[0] - int(offsets[row])]
    if ids.dim() == 1 and len(ids) % batch.size == 0:
        row, place = divmod(at[0], len(ids) // batch.size)
        return row, [place]
    return None, at


def _column(
    ids: torch.Tensor, at: list[int], row: int | None, place: list[int], batch: Batch
) -> str:
    """Which of the inputs, and which column of it: where it went into the table as it is, or else
    where the row has this number."""
    for name, tensor in named_tensors("inputs", batch.inputs):
        if tensor.shape == ids.shape and bool((tensor == ids).all()):
            return name + "".join(f", column {number}" for number in place[:1])
        if tensor.dim() == 2 and len(tensor) == len(ids) and ids.dim() == 1:
            same = (tensor == ids[:, None]).all(0).nonzero()
            if len(same):
                return f"{name}, column {int(same[0])}"
    for name, tensor in named_tensors("inputs", batch.inputs):
        if row is not None and tensor.dim() <= 2 and len(tensor) == batch.size:
            equal = (tensor[row].reshape(-1) == ids[tuple(at)]).nonzero()
            if len(equal):
                return name + (f", column {int(equal[0])}" if tensor.dim() == 2 else "")
    return f"place {', '.join(map(str, place)) or 0} of what the table is given"


def _sample(row: int, batch: Batch, source: Source | None) -> str:
    if batch.indices is None:
        return f"row {row} of the batch"
    number = int(batch.indices[row])
    place = source.where(number) if isinstance(source, Pipeline) else None
    return f"sample {number}" + (f" ({place})" if place else "")
