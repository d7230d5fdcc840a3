"""Checks for ids without a row in an embedding table; errors name table, column and sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from flatout.data import Batch, Pipeline, Source, named_tensors, samples_of_items, tensors_in
from flatout.errors import DataError, FlatoutError
from flatout.models import adapter_of, calls_hooks, own_names
from flatout.train.losses.broadcast import uncompiled
from flatout.train.micro_batch import is_out_of_memory
from flatout.train.snapshot import untouched

_KINDS = (nn.Embedding, nn.EmbeddingBag)
# Part of CUDA's error message after a kernel has used an index that is out of range.
_ASSERT = "device-side assert"


@contextmanager
def ids_checked(model: nn.Module, batch: Batch, source: Source | None) -> Iterator[None]:
    """Check ids in this context before an embedding table is read; waits for the device.

    A table is a module, the weight given to F.embedding, or a parameter or buffer that is indexed.
    """
    handles = []
    errors: list[DataError] = []
    names: dict[int, str] = {}
    for name, table, size in adapter_of(model).tables():
        if isinstance(table, _KINDS):  # the mode below checks the module's call of F.embedding
            names[id(table.weight)] = name
            continue

        def look(_: Any, args: Any, kwargs: Any, name: str = name, size: int = size) -> None:
            given = [*args, *kwargs.values()]
            if given and torch.is_tensor(given[0]):
                try:
                    _check(name, size, given, batch, source)
                except DataError as error:
                    errors.append(error)
                    raise

        handles.append(table.register_forward_pre_hook(look, with_kwargs=True, prepend=True))
    try:
        with uncompiled(), _Look(model, names, batch, source):
            yield
    except Exception:
        if errors:  # raises the error without Keras' message around it
            raise errors[0] from None
        raise
    finally:
        for handle in handles:
            handle.remove()


def explain_ids(
    error: Exception,
    model: nn.Module,
    batches: Sequence[Batch],
    compute: Callable[[Batch], object],
    source: Source | None,
) -> None:
    """Raise a DataError if an id outside of a table caused this error.

    Computes the batches once more, and undoes all effects.
    """
    if isinstance(error, FlatoutError) or is_out_of_memory(error):
        return
    if not any(adapter_of(model).tables()) and "index" not in str(error).lower():
        return
    for batch in batches:
        try:
            with untouched(model, compute), torch.no_grad(), ids_checked(model, batch, source):
                compute(batch)
        except DataError as explained:
            raise explained from error
        except Exception:
            return


def ids_checked_where_unsaid(
    model: nn.Module, batch: Batch, source: Source | None
) -> AbstractContextManager[None]:
    """Return `ids_checked` if an id out of range would break the device or pass unnoticed.

    Keras counts negative ids from the end, and cuts them to 32 bits. On a CPU, torch's own tables
    refuse such ids, and `explain_ids` names them.
    """
    on_device = ends_the_device(batch)
    if not on_device and not _has_odd_numbers(batch):
        return nullcontext()
    tables = [module for _, module, _ in adapter_of(model).tables()]
    if not any(on_device or not isinstance(module, _KINDS) for module in tables):
        return nullcontext()
    return ids_checked(model, batch, source)


def ids_checked_in_evaluation(
    model: nn.Module, source: Source | None
) -> Callable[[Batch], AbstractContextManager[None]]:
    """Return a function that applies `ids_checked_where_unsaid` to each batch of an evaluation.

    The kinds of the model's tables are found once.
    """
    takes_odd_ids = not calls_hooks(model)  # on a CPU torch's own tables refuse them

    def checked(batch: Batch) -> AbstractContextManager[None]:
        if takes_odd_ids or ends_the_device(batch):
            return ids_checked_where_unsaid(model, batch, source)
        return nullcontext()

    return checked


def ids_checked_in_step(
    model: nn.Module, batches: Sequence[Batch], source: Source | None
) -> AbstractContextManager[None]:
    """Return `ids_checked_where_unsaid` for a step's first batch that may have such an id."""
    odd = next((batch for batch in batches if _has_odd_numbers(batch)), None)
    return nullcontext() if odd is None else ids_checked_where_unsaid(model, odd, source)


def _has_odd_numbers(batch: Batch) -> bool:
    given = tensors_in(batch.inputs)
    whole = [t for t in given if t.numel() and t.dtype in (torch.int32, torch.int64)]
    return any(bool(((tensor < 0) | (tensor >= 2**31)).any()) for tensor in whole)


def ends_the_device(batch: Batch) -> bool:
    """Return whether an id out of range makes the device unusable for this process."""
    return any(tensor.device.type != "cpu" for tensor in tensors_in(batch.inputs))


@contextmanager
def device_asserts_explained(model: nn.Module) -> Iterator[None]:
    """Explain the error of a GPU kernel that got an index outside of its tensor.

    torch does not report the index, and the process can no longer use the GPU.
    """
    try:
        yield
    except Exception as error:
        if _ASSERT not in str(error):
            raise
        names = [name for name, _, _ in adapter_of(model).tables()]
        raise DataError(
            "a kernel on the GPU found an index that is outside of its tensor: an id that an "
            "embedding table has no row for, or a label that is no class",
            where=f"the embedding tables are {', '.join(names)}" if names else None,
            do="run it again with world.device=cpu, where the error names the first such sample; "
            "this process cannot use the GPU any more",
        ) from error


class _Look(TorchFunctionMode):
    """Checks the ids by which functions and operators read tables."""

    def __init__(
        self, model: nn.Module, tables: Mapping[int, str], batch: Batch, source: Source | None
    ) -> None:
        super().__init__()
        self._of = (batch, source)
        tensors = dict((*model.named_parameters(), *model.named_buffers()))
        own = own_names(model, list(tensors))
        self._names = {id(tensor): own[name] for name, tensor in tensors.items()} | dict(tables)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (F.embedding, F.embedding_bag):
            given = dict(zip(("input", "weight", "offsets"), args, strict=False)) | kwargs
            table = given["weight"]
            name = self._names.get(id(table), f"of shape {tuple(table.shape)}")
            _check_dtype(name, given["input"], self._of[0])
            _check(name, len(table), [given["input"], given.get("offsets")], *self._of)
        elif func in _READS and args and id(args[0]) in self._names:
            ids = kwargs.get("index", args[-1])
            ids = ids[0] if isinstance(ids, tuple) and ids else ids
            dim = kwargs.get("dim", args[1] if len(args) > 2 else 0)
            if torch.is_tensor(ids) and dim == 0 and ids.dtype in (torch.int32, torch.int64):
                name, size = self._names[id(args[0])], len(args[0])
                lowest = -size if func is torch.Tensor.__getitem__ else 0
                _check(name, size, [ids], *self._of, lowest)
        return func(*args, **kwargs)


_READS = (torch.Tensor.__getitem__, torch.Tensor.index_select, torch.index_select)


def _check_dtype(name: str, ids: torch.Tensor, batch: Batch) -> None:
    if ids.dtype not in (torch.int32, torch.int64):
        dtype = str(ids.dtype).removeprefix("torch.")
        raise DataError(
            f"the embedding table {name} reads rows by int64 or int32 ids, found {dtype}",
            where=_input_of(ids, batch),
            do="give ids as whole numbers, such as x.long(); a schema states dtype = 'int64'",
        )


def _input_of(ids: torch.Tensor, batch: Batch) -> str | None:
    for name, tensor in named_tensors("inputs", batch.inputs):
        if tensor.shape == ids.shape and bool((tensor == ids).all()):
            return name
    return None


def _check(
    name: str,
    size: int,
    given: list[Any],
    batch: Batch,
    source: Source | None,
    lowest: int = 0,
) -> None:
    ids = given[0].detach()
    bad = (ids < lowest) | (ids >= size)
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
        do="give the table as many rows as there are ids; or state ids of the column in the "
        "schema, which gives each a row, unknown ones a separate row, or hashes them",
    )


def _row(given: list[Any], at: list[int], batch: Batch) -> tuple[int | None, list[int]]:
    ids = given[0]
    offsets = given[1] if len(given) > 1 else None
    in_bags = ids.dim() == 1 and torch.is_tensor(offsets)
    if in_bags or batch.is_jagged:
        marks = (offsets,) if in_bags else batch.inputs
        of_items = samples_of_items(marks, len(ids), batch.size)
        if of_items is not None:
            row = int(of_items[at[0]])
            return row, [at[0] - int((of_items < row).sum()), *at[1:]]
    if len(ids) == batch.size:
        return at[0], at[1:]
    if ids.dim() == 1 and len(ids) % batch.size == 0 and not batch.is_jagged:
        row, place = divmod(at[0], len(ids) // batch.size)
        return row, [place]
    return None, at


def _column(
    ids: torch.Tensor, at: list[int], row: int | None, place: list[int], batch: Batch
) -> str:
    whole = _input_of(ids, batch)
    if whole and batch.is_jagged:
        return f"{whole}, place {at[0]}"
    if whole:
        return whole + "".join(f", column {number}" for number in place[:1])
    for name, tensor in named_tensors("inputs", batch.inputs):
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
