"""Inputs without a row for each sample: detects them, and finds the sample of each item.

    flat ids with offsets    ids[nnz], offsets[B] or offsets[B + 1], weights[nnz]
    packed sequences         tokens[total], cu_seqlens[B + 1]; torch's PackedSequence
    graphs                   x[nodes], edge_index[2, E], batch[nodes]; targets of graphs or of nodes

Inputs count as jagged only if their offsets or graph indices prove it. Inputs that only differ in
length are usually a mistake in the data, and raise an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from flatout.data.batches.batch import tensors_in, tensors_of_object

NO_ROWS = "the inputs have no row for each sample"
"""Reason why a jagged batch is not split, not compiled for its shape and not stored."""


def is_surely_jagged(inputs: Any, size: int) -> bool:
    if holds_object(inputs):
        return True
    tensors = [tensor for tensor in tensors_in(inputs) if tensor.dim()]
    others = [tensor for tensor in tensors if len(tensor) != size]
    if not others:
        return any(map(_is_one_id_each, tensors, tensors[1:]))
    known = {id(tensor) for mark in tensors for tensor in _explained(mark, tensors, size)}
    return all(id(tensor) in known for tensor in others)


def samples_without_targets(inputs: Any) -> int | None:
    """Return the number of samples of inputs without a row for each, or None if not certain."""
    if isinstance(inputs, PackedSequence):
        return int(inputs.batch_sizes[0])
    tensors = tensors_in(inputs)
    if holds_object(inputs):
        graphs = getattr(inputs, "num_graphs", None)
        return graphs if isinstance(graphs, int) else next((len(t) for t in tensors if t.dim()), 1)
    for tensor in tensors:
        # the first row of offsets by field
        mark = tensor[0] if tensor.dim() == 2 and len(tensor) else tensor
        if _rises(mark):
            for size in (int(mark[-1]) + 1, len(mark) - 1, len(mark)):
                if size and is_surely_jagged(inputs, size):
                    return size
    return None


def samples_of_items(inputs: Any, items: int, size: int) -> Tensor | None:
    """Return the sample of each of `items` ids, tokens or nodes as int64, or None if not known.

    Args:
        inputs: inputs of a batch, with the offsets or the numbers of graphs.
        items: number of ids, tokens or nodes.
        size: number of samples of the batch.
    """
    result: Tensor | None = None
    for mark in tensors_in(inputs):
        if not _rises(mark):
            continue
        length, last = len(mark), int(mark[-1])
        if length == items and last == size - 1:
            of_items = mark.long()
        elif (length == size and last <= items) or (length == size + 1 and last == items):
            places = torch.arange(items, device=mark.device)
            of_items = torch.searchsorted(mark[:size].long().contiguous(), places, right=True) - 1
        else:
            continue
        if result is not None and not torch.equal(result, of_items):
            return None
        result = of_items
    if result is None and items == size:  # targets are those of tokens or nodes
        result = torch.arange(size)
    return result


def holds_object(inputs: Any) -> bool:
    """Return whether the inputs hold an object of another library, whose rows are not known."""
    if isinstance(inputs, dict):
        return any(map(holds_object, inputs.values()))
    if isinstance(inputs, (tuple, list)) and not isinstance(inputs, PackedSequence):
        return any(map(holds_object, inputs))
    return tensors_of_object(inputs) is not None


def _explained(mark: Tensor, tensors: Sequence[Tensor], size: int) -> Iterator[Tensor]:
    others = [*_by_offsets(mark, tensors, size), *_by_graphs(mark, tensors, size)]
    if others:
        yield mark
        yield from others


def _by_offsets(mark: Tensor, tensors: Sequence[Tensor], size: int) -> Iterator[Tensor]:
    if mark.dim() == 2 and mark.shape[1] in (size, size + 1) and all(map(_rises, mark)):
        least = len(mark), max(1, int(mark[:, -1].max()))
        yield from (t for t in tensors if t is not mark and _fits(t, least))
        for offsets in mark:
            yield from _by_offsets(offsets, tensors, size)
    if not _rises(mark):
        return
    length, last = len(mark), int(mark[-1])
    others = [tensor for tensor in tensors if tensor is not mark]
    if length == size + 1 or (length != size and last == size):  # the samples are tokens
        yield from (tensor for tensor in others if len(tensor) == last)
    elif length == size:
        # All zeros are ambiguous: bags of which only the last has ids, or a column of zeros.
        lengths = {len(t) for t in others if _is_whole(t, 1) and last <= len(t) != size}
        lengths = {each for each in lengths if last or size == 1 or not each}
        yield from (tensor for tensor in others if len(tensor) in lengths)


def _by_graphs(mark: Tensor, tensors: Sequence[Tensor], size: int) -> Iterator[Tensor]:
    if _rises(mark) and len(mark) != size and int(mark[-1]) == size - 1:
        nodes = len(mark)
        yield from (tensor for tensor in tensors if len(tensor) == nodes and tensor is not mark)
        for edges in tensors:
            if _joins(edges, nodes):
                yield from _of_edges(edges, tensors)
    elif _joins(mark, size) and mark.shape[1] != size:  # the samples are nodes
        yield from _of_edges(mark, tensors)


def _of_edges(edges: Tensor, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    yield from (t for t in tensors if t is edges or len(t) == edges.shape[1])


def _joins(edges: Tensor, nodes: int) -> bool:
    if not (_is_whole(edges, 2) and len(edges) == 2 and edges.numel()):
        return False
    return int(edges.min()) >= 0 and int(edges.max()) < nodes


def _is_one_id_each(ids: Tensor, offsets: Tensor) -> bool:
    if not (_is_whole(ids, 1) and _is_whole(offsets, 1) and len(ids) == len(offsets) > 1):
        return False
    numbers = torch.arange(len(offsets), dtype=offsets.dtype, device=offsets.device)
    return torch.equal(offsets, numbers)


def _rises(tensor: Tensor) -> bool:
    if not _is_whole(tensor, 1) or not len(tensor) or int(tensor[0]):
        return False
    return bool((tensor[1:] >= tensor[:-1]).all())


def _fits(ids: Tensor, least: tuple[int, int]) -> bool:
    return _is_whole(ids, 2) and len(ids) == least[0] and ids.shape[1] >= least[1]


def _is_whole(tensor: Tensor, dim: int) -> bool:
    return tensor.dim() == dim and tensor.dtype in (torch.int32, torch.int64)
