"""The settings of a step that can be switched on a live model, and switched back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import make_dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from flatout.devices import allocator, matmul_precision, threads
from flatout.errors import ModelError
from flatout.models import (
    FORMATS,
    find_rewrites,
    format_of,
    fused_norms_of,
    guarding_group_norms,
    has_group_norms,
    keep_in_fp32,
    lay_out,
    look_at_ids,
    recompute_activations,
)
from flatout.optim import (
    Optimizers,
    RowShards,
    TouchedRows,
    align_state,
    as_tuple,
    can_fuse,
    fuse,
    is_fused,
    unfuse,
)
from flatout.recipe import SETTINGS, Live, ResolvedRecipe
from flatout.train.tables.row_tables import Tables

Undo = Callable[[], None]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

# The Recipe's field of each setting, by its name in its section.
FIELDS = {f.partition(".")[2]: f for f, setting in SETTINGS.items() if setting.live}
LIVE: dict[str, Live] = {
    name: live for name, field in FIELDS.items() if (live := SETTINGS[field].live) is not None
}
"""Functions that switch a live model to each setting, by the setting's name."""
# Settings that change the model's code, the lowest first: rewriting skips recomputed modules, and
# both must be applied before the model is compiled.
_LAYERS = sorted(filter(lambda name: LIVE[name].layer, LIVE), key=lambda name: LIVE[name].layer)
_VALUES = [(name, Any, SETTINGS[field].plain) for name, field in FIELDS.items()]


class Settings(make_dataclass("Values", _VALUES, frozen=True)):  # type: ignore[misc]
    """A value for each setting that a live model is switched to, by its name in its section."""

    @classmethod
    def of(cls, recipe: ResolvedRecipe) -> Settings:
        """Return the settings of a resolved Recipe."""
        return cls(**{name: recipe.get(field) for name, field in FIELDS.items()})

    def but(self, **changes: Any) -> Settings:
        """Return a copy with some settings changed."""
        return replace(self, **changes)

    def other_than(self, plain: Settings) -> dict[str, Any]:
        """Return the Recipe's fields in which these settings differ from `plain`, with values."""
        values = {field: getattr(self, name) for name, field in FIELDS.items()}
        return {f: v for f, v in values.items() if v != getattr(plain, f.partition(".")[2])}


class Switch:
    """Holds a model and its optimizers at some Settings; `use` switches to other Settings.

    All changes are in place: the user's objects, their parameters and their state dict keys stay.
    """

    def __init__(self, model: nn.Module, optimizers: Optimizers, device: torch.device) -> None:
        if any(map(is_lazy, [*model.parameters(), *model.buffers()])):
            raise ModelError(
                "the model has a lazy layer, which has no shape before the first batch",
                do="call the model once on a batch before training, then make the optimizer",
            )
        self.model = model
        self.optimizers = as_tuple(optimizers)
        self.device = device
        self._is_cpu, self._has_group_norms = device.type == "cpu", has_group_norms(model)
        tables = (m for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)))
        self._sparse = {id(table.weight) for table in tables if table.sparse}
        asked = {name: live.now(self) for name, live in LIVE.items() if live.now}
        self.now = Settings(**asked)
        self._undo: dict[str, list[Undo]] = {}
        self.rows: dict[torch.optim.Optimizer, TouchedRows] = {}
        self.tables: Tables | None = None  # tables of the model, if some are stepped by rows
        self.shards: RowShards | None = None  # set if rows are to be sharded over ranks
        self.splits_tables = False  # whether tables of bf16 have lower halves
        # Tables that steps have read whole, with reasons.
        self._read_whole: dict[torch.Tensor, str] = {}

    def use(self, wanted: Settings) -> None:
        """Switch model, optimizer and process to the `wanted` settings."""
        now = self.now
        # In the order of the Recipe, so that parameters and the optimizer's state have the same
        # memory format before a fused kernel uses both.
        for name, live in LIVE.items():
            value = getattr(wanted, name)
            if live.apply and not live.layer and (live.may_change or value != getattr(now, name)):
                live.apply(self, value)
        # Record the settings applied so far, in case changing the code fails.
        self.now = wanted.but(**{name: getattr(now, name) for name in _LAYERS})
        self._change_code(wanted)

    def _change_code(self, wanted: Settings) -> None:
        """Undo code changes down to the lowest that differs, and apply those that are wanted."""
        changing = [n for n in _LAYERS if getattr(wanted, n) != getattr(self.now, n)]
        if not changing:
            return
        above = _LAYERS[_LAYERS.index(changing[0]) :]
        for name in reversed(above):
            for undo in reversed(self._undo.pop(name, [])):
                undo()
        self.now = self.now.but(**dict.fromkeys(above, "off"))
        for name in above:
            value = getattr(wanted, name)
            if value != "off":
                apply = LIVE[name].apply
                assert apply is not None
                self._undo[name] = apply(self, value)
                self.now = self.now.but(**{name: value})

    @property
    def guards_group_norms(self) -> bool:
        """Whether GroupNorm, as a module or a function, may get images in channels_last."""
        may_meet = self._has_group_norms or self.now.memory_format == "channels_last"
        return self._is_cpu and may_meet

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which forward runs."""
        # An autocast context open around the fit may still cache cast weights of an earlier step.
        torch.clear_autocast_cache()
        dtype = _DTYPES.get(self.now.precision)
        within: AbstractContextManager[Any] = nullcontext()
        if dtype is not None:
            within = torch.autocast(self.device.type, dtype)
        return guarding_group_norms(within) if self.guards_group_norms else within

    def release(self) -> None:
        """Undo the code changes of the model; weights, layout and optimizer stay."""
        self.use(self.now.but(**dict.fromkeys(_LAYERS, "off")))
        if self.shards is not None:
            self.shards.keep_from_reads()

    # -- interface for settings --------------------------------------------------------------

    torch = torch
    allocator = allocator
    set_threads = staticmethod(threads.set_threads)
    matmul_precision = staticmethod(matmul_precision)

    def benchmark_cudnn(self, wanted: bool) -> None:
        """Set whether cuDNN measures its algorithms."""
        torch.backends.cudnn.benchmark = wanted

    @property
    def memory_format(self) -> str:
        """Memory format of the weights."""
        return format_of(self.model)

    def lay_out(self, memory_format: str) -> None:
        """Convert weights and the optimizers' state to a memory format."""
        lay_out(self.model, FORMATS[memory_format])
        for optimizer in self.optimizers:
            align_state(optimizer)

    @property
    def is_fused(self) -> bool:
        """Whether an optimizer is fused."""
        return any(map(is_fused, self.optimizers))

    def fuse(self, wanted: bool) -> None:
        """Fuse or unfuse optimizers; a loaded state may have changed the option."""
        for optimizer in self.optimizers:
            if wanted != is_fused(optimizer) and (self.can_fuse(optimizer) or not wanted):
                (fuse if wanted else unfuse)(optimizer)

    def can_fuse(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether fusing is possible and the user has not set `fused`.

        Fused kernels take no sparse gradients, which some `nn.Embedding` layers have.
        """
        own = (parameter for group in optimizer.param_groups for parameter in group["params"])
        can = can_fuse(optimizer) or is_fused(optimizer)
        return can and self._sparse.isdisjoint(map(id, own))

    def set_allocator(self, value: str) -> None:
        """Set the allocator; after `keep`, glibc's own adaptive limits do not return."""
        (allocator.keep_memory if value == "keep" else allocator.default_memory)()

    def recompute_activations(self) -> list[Undo]:
        """Recompute activations in the backward pass."""
        return [recompute_activations(self.model)]

    def rewrite(self) -> list[Undo]:
        """Apply all exact rewrites that are found in the model."""
        return [rewrite.apply() for rewrite in find_rewrites(self.model)]

    def fuse_norms(self) -> list[Undo]:
        """Fuse the model's BatchNorms with the activations that follow."""
        return [rewrite.apply() for rewrite in fused_norms_of(self.model)]

    def keep_in_fp32(self) -> list[Undo]:
        """Keep operators of the model in fp32 that may be slower in bf16."""
        return keep_in_fp32(self.model)

    def touch_rows(self) -> list[Undo]:
        """Step tables by the rows that a batch has used."""
        result = Tables.of(self.model, self.optimizers, split=self.splits_tables)
        self.tables = result.without(self._read_whole, self.model)
        for optimizer, own in self.tables.by_rows.items():
            self.rows[optimizer] = TouchedRows(optimizer, own, self.shards)
            self.rows[optimizer].attach()
        if self.shards is not None and self.tables.names:
            self.tables = replace(self.tables, layout=self.shards.words())
        return [self._leave_rows, *look_at_ids(self.model, self.tables.names)]

    def shard(self, shards: RowShards | None) -> None:
        """Shard rows of tables over ranks; tables stepped by rows now are switched off first."""
        if shards is not None and self.rows:
            self.use(self.now.but(touched_rows="off"))
        self.shards = shards

    def _leave_rows(self) -> None:
        for rows in self.rows.values():
            rows.detach()
        self.rows.clear()
        self.tables = None

    def leave_read_whole(self) -> bool:
        """Exclude tables that the last step has read whole; return whether any table is new."""
        if not self.rows:
            return False
        left = [pair for rows in self.rows.values() for pair in rows.left.items()]
        return self.leave(dict(left))

    def leave(self, whole: Mapping[torch.Tensor, str]) -> bool:
        """Never step these tables by rows, for the given reasons; return whether any is new."""
        new = {weight: why for weight, why in whole.items() if weight not in self._read_whole}
        self._read_whole |= new
        if new and self.tables is not None:
            self.tables = self.tables.without(new, self.model)
        return bool(new)

    def settle_rows(self) -> None:
        """Bring all rows of tables up to date, before code that reads tables whole."""
        for rows in self.rows.values():
            rows.settle()

    def spread_rows(self) -> None:
        """From now on, keep only this rank's own rows of sharded tables."""
        for rows in self.rows.values():
            rows.spread()

    def gather_rows(self) -> None:
        """Restore all rows of the tables on all ranks; all ranks call it."""
        for rows in self.rows.values():
            rows.gather_rows()

    @contextmanager
    def rows_as_they_lie(self) -> Iterator[None]:
        """Let lookups in this context use this rank's rows, for code that only needs the ids."""
        if self.shards is not None:
            self.shards.lies = True
        try:
            yield
        finally:
            if self.shards is not None:
                self.shards.lies = False

    def compile(self) -> list[Undo]:
        """Compile the model, as `model.compile` does."""
        before = self.model._compiled_call_impl
        self.model.compile()
        return [lambda: setattr(self.model, "_compiled_call_impl", before)]
