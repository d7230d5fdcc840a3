"""A parameter that reports reads of its values, and the rows that an embedding reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

# Attributes of a tensor that do not read its values. Some versions of torch lack some of these
# attributes.
_PROPERTIES = (
    "_backward_hooks", "_grad", "_post_accumulate_grad_hooks", "_version", "device", "dtype",
    "grad", "grad_fn", "is_cpu", "is_cuda", "is_leaf", "is_meta", "is_mkldnn", "is_mps",
    "is_nested", "is_quantized", "is_sparse", "is_sparse_csr", "is_xpu", "itemsize", "layout",
    "names", "nbytes", "ndim", "output_nr", "requires_grad", "retains_grad", "shape",
)  # fmt: skip
_METHODS = (
    "__hash__", "__len__", "data_ptr", "dim", "element_size", "get_device", "has_names",
    "is_complex", "is_contiguous", "is_conj", "is_floating_point", "is_inference", "is_neg",
    "is_shared", "is_signed", "ndimension", "nelement", "numel", "register_hook",
    "register_post_accumulate_grad_hook", "requires_grad_", "size", "storage_offset", "stride",
)  # fmt: skip
_WITHOUT_VALUES = {
    *(getattr(Tensor, name).__get__ for name in _PROPERTIES if hasattr(Tensor, name)),
    *(getattr(Tensor, name) for name in _METHODS if hasattr(Tensor, name)),
    *(getattr(torch, name) for name in ("is_complex", "is_floating_point", "numel")),
    *(getattr(Tensor, name).__set__ for name in ("_grad", "grad", "requires_grad")),
}
# Functions that read rows as an embedding does if they get integer indices.
_INDEXED = (Tensor.__getitem__, Tensor.index_select, torch.index_select)


class Lookup(Protocol):
    """Interface of an object that reads rows in place of torch's operators."""

    def embedding(self, padding_idx: int | None, scale_grad_by_freq: bool) -> Tensor:
        """Return the result of torch.nn.functional.embedding."""
        ...

    def embedding_bag(
        self, offsets: Tensor | None, padding_idx: int | None, **options: Any
    ) -> Tensor:
        """Return the result of torch.nn.functional.embedding_bag."""
        ...


class Reader(Protocol):
    """Interface of an object that is called before each read of a table."""

    def by_rows(self, ids: Tensor) -> Lookup | None:
        """Return an object that reads these rows of an embedding, or None for torch's operator."""
        ...

    def whole(self) -> None:
        """Prepare for a read or write of any of the table's values."""
        ...


class TableParameter(nn.Parameter):
    """An nn.Parameter that reports its reads. Copies and pickles of it are plain parameters."""

    _reader: Reader

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _WITHOUT_VALUES:
                return func(*args, **given)
            if func is functional.embedding:
                return _embedding(*args, **given)
            if func is functional.embedding_bag:
                return _embedding_bag(*args, **given)
            if func in _INDEXED and args and (ids := _rows_of(func, *args, **given)) is not None:
                lookup = args[0]._reader.by_rows(ids)
                return func(*args, **given) if lookup is None else lookup.embedding(None, False)
            if func is Tensor.to and (same := func(*args, **given)) is args[0]:
                return same  # Keras makes sure before each use that the value is on the device
            for table in _tables((args, given)):
                table._reader.whole()
            return func(*args, **given)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        result: nn.Parameter = memo[id(self)]
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = nn.Parameter(self.detach(), self.requires_grad)
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def watch_table(weight: nn.Parameter, reader: Reader) -> None:
    """Report each read of a parameter's values to `reader`.

    The parameter must be an nn.Parameter and not of a subclass.
    """
    weight.__class__ = TableParameter
    weight._reader = reader  # type: ignore[attr-defined]


def unwatch_table(weight: nn.Parameter) -> None:
    """Make a watched parameter a plain nn.Parameter again."""
    weight.__class__ = nn.Parameter
    del weight._reader  # type: ignore[attr-defined]


def _tables(values: Any) -> Iterator[TableParameter]:
    if isinstance(values, TableParameter):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _tables(value)
    elif isinstance(values, dict):
        yield from _tables(tuple(values.values()))


def _embedding(
    input: Tensor,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    lookup = _lookup(input, weight, max_norm)
    if lookup is not None:
        return lookup.embedding(_place(padding_idx, weight), scale_grad_by_freq)
    return functional.embedding(
        input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse
    )


def _embedding_bag(
    input: Tensor,
    weight: Any,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    lookup = _lookup(input, weight, max_norm)
    if lookup is not None:
        return lookup.embedding_bag(
            offsets,
            _place(padding_idx, weight),
            scale_grad_by_freq=scale_grad_by_freq,
            mode=mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=include_last_offset,
        )
    return functional.embedding_bag(
        input, weight, offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse,
        per_sample_weights, include_last_offset, padding_idx,
    )  # fmt: skip


def _place(padding_idx: int | None, weight: Tensor) -> int | None:
    return padding_idx if padding_idx is None or padding_idx >= 0 else padding_idx + len(weight)


def _lookup(ids: Any, weight: Any, max_norm: float | None) -> Lookup | None:
    if isinstance(weight, TableParameter) and max_norm is None:
        return weight._reader.by_rows(ids)
    # max_norm changes the weights; torch takes both orders of arguments
    for table in _tables((ids, weight)):
        table._reader.whole()
    return None


def _rows_of(func: Any, table: Any, *given: Any, **named: Any) -> Tensor | None:
    if func is Tensor.__getitem__:
        ids = _first_index(*given)
    else:
        options = dict(zip(("dim", "index"), given, strict=False)) | named
        ids = options.get("index") if options.get("dim") == 0 and len(options) == 2 else None
    if type(table) is not TableParameter or type(ids) is not Tensor or not ids.dim():
        return None
    if ids.dtype not in (torch.int32, torch.int64) or ids.device != table.device:
        return None
    if func is not Tensor.__getitem__ or (ids.is_cpu and not bool((ids < 0).any())):
        return ids
    return torch.where(ids < 0, ids + len(table), ids)  # negative ids count from the end


def _first_index(index: Any) -> Any:
    if not isinstance(index, tuple):
        return index
    is_whole = len(index) == 2 and (index[1] is Ellipsis or _is_all(index[1]))
    return index[0] if is_whole else None


def _is_all(index: Any) -> bool:
    return isinstance(index, slice) and index == slice(None)
