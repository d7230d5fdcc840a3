"""Records of the ids by which a forward reads embedding tables, and of the samples of each id."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from flatout.data import Batch, samples_of_items


class TableReads(TorchFunctionMode):
    """Records ids in this context with which F.embedding and F.embedding_bag read tables."""

    def __init__(self) -> None:
        super().__init__()
        self._reads: dict[int, list[tuple[torch.Tensor, torch.Tensor | None]]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (F.embedding, F.embedding_bag):
            given = dict(zip(("input", "weight", "offsets"), args, strict=False)) | kwargs
            offsets = given.get("offsets") if func is F.embedding_bag else None
            read = given["input"].detach(), offsets
            self._reads.setdefault(id(given["weight"]), []).append(read)
        return func(*args, **kwargs)

    def samples(self, weight: torch.Tensor, rows: list[int], batch: Batch) -> list[int]:
        """Return the samples, by their place in the batch, that have read given rows of a table.

        Ids whose sample is unknown are left out.
        """
        size = batch.size
        samples: set[int] = set()
        for ids, offsets in self._reads.get(id(weight), []):
            is_bad = torch.isin(ids, torch.tensor(rows, dtype=ids.dtype, device=ids.device))
            places = is_bad.reshape(-1).nonzero()[:, 0]
            if offsets is not None and len(offsets) in (size, size + 1):
                starts = offsets.to(places.dtype)
                samples.update((torch.searchsorted(starts, places, right=True) - 1).tolist())
            elif offsets is None and batch.is_jagged and ids.dim():
                of_items = samples_of_items(batch.inputs, len(ids), size)
                if of_items is not None:
                    samples.update(of_items[places // max(1, ids.numel() // len(ids))].tolist())
            elif offsets is None and ids.numel() and ids.numel() % size == 0:
                samples.update((places // (ids.numel() // size)).tolist())
        return sorted(samples)
