"""Finds embedding tables that can be stepped by rows, and whether that needs a trial."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from flatout.data import Batch, tensors_in
from flatout.models import adapter_of, row_tables, table_weight
from flatout.optim import ByRow, name_of, steppable_rows, why_whole
from flatout.train.explanation import TABLES
from flatout.words import counted

# Limits for the total number of elements in all tables. _FEW: minimum for which steps by rows are
# tried. _MANY: minimum for which steps by rows need no trial if a batch reads only a small part.
_FEW, _MANY = 1 << 16, 1 << 21
# Minimum ratio of the number of elements in tables to the maximum number that a batch reads.
# _TRIED: ratio from which steps by rows are tried. _TAKEN: ratio from which steps by rows are used
# without a trial. A dense step moves 40 bytes per element, a step by rows about twice as many.
_TRIED, _TAKEN = 2, 8
# A table with fewer than _SMALL elements and less than the fraction _SMALL_SHARE of all elements is
# stepped whole, since the calls for a step by rows would take more time.
_SMALL, _SMALL_SHARE = 1 << 14, 1 / 64
_SHOWN = 3


@dataclass(frozen=True)
class Tables:
    """The embedding tables of a model.

    Attributes:
        by_rows: by optimizer, the tables of which only the rows that a batch has read can be
            stepped.
        names: number of rows of these tables by name, each table once.
        whole: by name of each other table, the reason why the whole table is stepped.
        sizes: by name, the number of rows and the width of every table, including those in `whole`.
        layout: the distribution of rows over ranks, in words; "" where each rank has all rows.
    """

    by_rows: dict[torch.optim.Optimizer, list[nn.Parameter]]
    names: dict[str, int]
    whole: dict[str, str]
    sizes: dict[str, tuple[int, int]]
    layout: str = ""

    @classmethod
    def of(
        cls,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        split: bool = False,
    ) -> Tables:
        """Find the tables without changing anything."""
        modules, whole = row_tables(model, split=split)
        tables = list(adapter_of(model).tables())
        named = {id(module): name for name, module, _ in tables}
        weights = [table_weight(module) for module in modules]
        numbers = sum(weight.numel() for weight in {id(w): w for w in weights}.values())
        names: dict[int, tuple[str, int]] = {}
        kept = []
        for module, weight in zip(modules, weights, strict=True):
            name, why = named[id(module)], why_whole(optimizers, weight)
            is_bf16 = weight.dtype is torch.bfloat16
            if is_bf16 and any(isinstance(optimizer, ByRow) for optimizer in optimizers):
                why = why or "its optimizer steps rows itself, in bf16"
            if not why and not is_bf16 and weight.numel() < min(_SMALL, _SMALL_SHARE * numbers):
                why = "small"
            if why:
                whole[name] = why
            else:
                kept.append(module)
                names.setdefault(id(weight), (name, len(weight)))
        sizes = {
            name: (rows, width)
            for name, module, rows in tables
            if (width := getattr(module, "embedding_dim", getattr(module, "output_dim", None)))
        }
        return cls(steppable_rows(optimizers, kept), dict(names.values()), whole, sizes)

    def without(self, left: Mapping[torch.Tensor, str], model: nn.Module) -> Tables:
        """Return these tables, with some of them moved to `whole`."""
        if not left:
            return self
        names, whole = dict(self.names), dict(self.whole)
        for name, module, _ in adapter_of(model).tables():
            if name in names and (why := left.get(table_weight(module))):
                del names[name]
                whole[name] = why
        others = {o: [w for w in own if w not in left] for o, own in self.by_rows.items()}
        by_rows = {optimizer: own for optimizer, own in others.items() if own}
        return replace(self, by_rows=by_rows, names=names, whole=whole)

    def outgrow(self, batch: Batch, *, surely: bool = False) -> bool:
        """Return whether steps by rows could be faster than steps of a dense optimizer."""
        sizes = [self.sizes[name] for name in self.names if name in self.sizes]
        ids = most_ids(batch) if surely else _likely_ids(batch, len(sizes))
        return _outgrow(sizes, ids, surely=surely)

    def are_whole_though_large(self, batch: Batch) -> bool:
        """Return whether there are large tables that cannot be stepped by rows."""
        ids = most_ids(batch)
        whole = [name for name, why in self.whole.items() if why != "small"]
        result = [self.sizes[name] for name in whole if name in self.sizes]
        return _outgrow(result, ids, surely=True)

    def share_words(self, batch: Batch) -> str:
        """Describe the fraction of the rows that a batch reads."""
        rows = sum(self.names.values())
        read = sum(min(name, most_ids(batch)) for name in self.names.values())
        return f"a batch reads at most {read:,} of {rows:,} rows"

    @property
    def words(self) -> str:
        """Line that reports how the tables are stepped."""
        parts = []
        if self.names:
            own = [item for item in self.by_rows if isinstance(item, ByRow)]
            kinds = dict.fromkeys(name_of(item) for item in self.by_rows if item not in own)
            weights = [weight for held in self.by_rows.values() for weight in held]
            parts = [f"{len(weights)} of {sum(map(len, weights)):,} rows"]
            if kinds:
                parts.append(f"touched rows only, dense {' and '.join(kinds)}'s result (rounding)")
            if any(item.dtype is torch.bfloat16 for own_ in self.by_rows.values() for item in own_):
                parts.append("bf16, with the lower halves in separate tensors")
            if own:
                parts.append(f"touched rows only, as {' and '.join(map(name_of, own))} does")
        if self.layout:
            parts.append(self.layout)
        if self.whole:
            parts.append(f"stepped whole: {self._whole_words()}")
        return f"{TABLES}{' · '.join(parts)}"

    def _whole_words(self) -> str:
        reasons = Counter(self.whole.values())
        parts = []
        for why, count in reasons.most_common(_SHOWN):
            name = next(name for name, value in self.whole.items() if value == why)
            parts.append(f"{name if count == 1 else counted(count, 'table')} ({why})")
        left = len(reasons) - len(parts)
        return ", ".join(parts) + (
            f", and others for {counted(left, 'other reason')}" if left else ""
        )


def most_ids(batch: Batch) -> int:
    """Return the largest number of ids that a batch can have."""
    return sum(tensor.numel() for tensor in tensors_in(batch.inputs))


def _likely_ids(batch: Batch, tables: int) -> int:
    inputs = list(tensors_in(batch.inputs))
    whole = [tensor for tensor in inputs if not tensor.is_floating_point()]
    return math.ceil(sum(tensor.numel() for tensor in whole or inputs) / max(1, tables))


def _outgrow(sizes: Sequence[tuple[int, int]], ids: int, *, surely: bool) -> bool:
    there = sum(rows * width for rows, width in sizes)
    read = sum(min(rows, ids) * width for rows, width in sizes)
    least, times = (_MANY, _TAKEN) if surely else (_FEW, _TRIED)
    return there >= least and there >= times * read
