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
from flatout.train.row_tables import Tables

Undo = Callable[[], None]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

# The Recipe's field of each setting, by its name in its section.
FIELDS = {f.partition(".")[2]: f for f, setting in SETTINGS.items() if setting.live}
LIVE: dict[str, Live] = {
    name: live for name, field in FIELDS.items() if (live := SETTINGS[field].live) is not None
}
"""How a live model is switched to each of them."""
# The lowest first: rewriting leaves alone what is recomputed, and both must be there before the
# model is compiled.
_LAYERS = sorted(filter(lambda name: LIVE[name].layer, LIVE), key=lambda name: LIVE[name].layer)
_VALUES = [(name, Any, SETTINGS[field].plain) for name, field in FIELDS.items()]


class Settings(make_dataclass("Values", _VALUES, frozen=True)):  # type: ignore[misc]
    """A value for each setting that a live model is switched to, by its name in its section."""

    @classmethod
    def of(cls, recipe: ResolvedRecipe) -> Settings:
        """The settings that a resolved Recipe asks for."""
        return cls(**{name: recipe.get(field) for name, field in FIELDS.items()})

    def but(self, **changes: Any) -> Settings:
        """These settings with some changed."""
        return replace(self, **changes)

    def other_than(self, plain: Settings) -> dict[str, Any]:
        """The fields of the Recipe in which these differ from others, and their values."""
        values = {field: getattr(self, name) for name, field in FIELDS.items()}
        return {f: v for f, v in values.items() if v != getattr(plain, f.partition(".")[2])}


class Switch:
    """Holds a model and its optimizers at some Settings; `use` brings them to others.

    Everything is done in place: the user's objects, their parameters and their state dict keys
    stay.
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
        self.tables: Tables | None = None  # where some are stepped by rows
        self.shards: RowShards | None = None  # where rows are to lie on several ranks
        self.splits_tables = False  # whether tables of bf16 have lower halves
        # Tables that steps have shown to be read whole, and why.
        self._read_whole: dict[torch.Tensor, str] = {}

    def use(self, wanted: Settings) -> None:
        """Bring model, optimizer and process from what they are to `wanted`."""
        now = self.now
        # In the order of the Recipe: the optimizer's state follows its parameters into a memory
        # format before a fused kernel sees both.
        for name, live in LIVE.items():
            value = getattr(wanted, name)
            if live.apply and not live.layer and (live.may_change or value != getattr(now, name)):
                live.apply(self, value)
        # What has been done stays known if changing the code fails.
        self.now = wanted.but(**{name: getattr(now, name) for name in _LAYERS})
        self._change_code(wanted)

    def _change_code(self, wanted: Settings) -> None:
        """Take layers off down to the lowest that changes, and put on those that are wanted."""
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
        """Whether a GroupNorm may meet images in channels_last: code may call its function."""
        may_meet = self._has_group_norms or self.now.memory_format == "channels_last"
        return self._is_cpu and may_meet

    def autocast(self) -> AbstractContextManager[Any]:
        """The context in which forward runs."""
        # An autocast that is open around the fit still holds cast weights of an earlier step.
        torch.clear_autocast_cache()
        dtype = _DTYPES.get(self.now.precision)
        within: AbstractContextManager[Any] = nullcontext()
        if dtype is not None:
            within = torch.autocast(self.device.type, dtype)
        return guarding_group_norms(within) if self.guards_group_norms else within

    def release(self) -> None:
        """Take the code changes off the model again; weights, layout and optimizer stay."""
        self.use(self.now.but(**dict.fromkeys(_LAYERS, "off")))
        if self.shards is not None:
            self.shards.keep_from_reads()

    # -- what settings ask for ---------------------------------------------------------------

    torch = torch
    allocator = allocator
    set_threads = staticmethod(threads.set_threads)
    matmul_precision = staticmethod(matmul_precision)

    def benchmark_cudnn(self, wanted: bool) -> None:
        """Whether cuDNN tries its algorithms out."""
        torch.backends.cudnn.benchmark = wanted

    @property
    def memory_format(self) -> str:
        """In which the weights lie."""
        return format_of(self.model)

    def lay_out(self, memory_format: str) -> None:
        """Weights and the optimizers' state."""
        lay_out(self.model, FORMATS[memory_format])
        for optimizer in self.optimizers:
            align_state(optimizer)

    @property
    def is_fused(self) -> bool:
        """Whether an optimizer is."""
        return any(map(is_fused, self.optimizers))

    def fuse(self, wanted: bool) -> None:
        """Asks the optimizers themselves: a state that was loaded brings its own options."""
        for optimizer in self.optimizers:
            if wanted != is_fused(optimizer) and (self.can_fuse(optimizer) or not wanted):
                (fuse if wanted else unfuse)(optimizer)

    def can_fuse(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether fusing is ours to switch: torch can, and the user did not choose.

        Fused kernels take no sparse gradients, as some of an `nn.Embedding` are.
        """
        own = (parameter for group in optimizer.param_groups for parameter in group["params"])
        can = can_fuse(optimizer) or is_fused(optimizer)
        return can and self._sparse.isdisjoint(map(id, own))

    def set_allocator(self, value: str) -> None:
        """Once `keep`, glibc's own adaptive limits do not come back."""
        (allocator.keep_memory if value == "keep" else allocator.default_memory)()

    def recompute_activations(self) -> list[Undo]:
        """In the backward pass."""
        return [recompute_activations(self.model)]

    def rewrite(self) -> list[Undo]:
        """The model, by all exact rewrites that are found."""
        return [rewrite.apply() for rewrite in find_rewrites(self.model)]

    def fuse_norms(self) -> list[Undo]:
        """The model's BatchNorms, with the activations behind them."""
        return [rewrite.apply() for rewrite in fused_norms_of(self.model)]

    def keep_in_fp32(self) -> list[Undo]:
        """The operators of the model that may be slower in bf16."""
        return keep_in_fp32(self.model)

    def touch_rows(self) -> list[Undo]:
        """Tables are stepped by the rows that a batch has used."""
        result = Tables.of(self.model, self.optimizers, split=self.splits_tables)
        self.tables = result.without(self._read_whole, self.model)
        for optimizer, own in self.tables.by_rows.items():
            self.rows[optimizer] = TouchedRows(optimizer, own, self.shards)
            self.rows[optimizer].attach()
        if self.shards is not None and self.tables.names:
            self.tables = replace(self.tables, layout=self.shards.words())
        return [self._leave_rows, *look_at_ids(self.model, self.tables.names)]

    def shard(self, shards: RowShards | None) -> None:
        """Let rows of tables lie on several ranks, those of tables stepped by rows now as well."""
        if shards is not None and self.rows:
            self.use(self.now.but(touched_rows="off"))
        self.shards = shards

    def _leave_rows(self) -> None:
        for rows in self.rows.values():
            rows.detach()
        self.rows.clear()
        self.tables = None

    def leave_read_whole(self) -> bool:
        """Whether the last step has shown that tables are read whole; that is kept in mind."""
        if not self.rows:
            return False
        left = [pair for rows in self.rows.values() for pair in rows.left.items()]
        return self.leave(dict(left))

    def leave(self, whole: Mapping[torch.Tensor, str]) -> bool:
        """Never step these tables by rows, for what is said of each; whether any of them is new."""
        new = {weight: why for weight, why in whole.items() if weight not in self._read_whole}
        self._read_whole |= new
        if new and self.tables is not None:
            self.tables = self.tables.without(new, self.model)
        return bool(new)

    def settle_rows(self) -> None:
        """Bring all rows of tables up to date, for someone who reads them whole."""
        for rows in self.rows.values():
            rows.settle()

    def spread_rows(self) -> None:
        """Each rank has nothing but its own rows of tables that are sharded, from here on."""
        for rows in self.rows.values():
            rows.spread()

    def gather_rows(self) -> None:
        """All ranks, which all call it, have all rows of their tables again."""
        for rows in self.rows.values():
            rows.gather_rows()

    @contextmanager
    def rows_as_they_lie(self) -> Iterator[None]:
        """Within, lookups give what is here, for someone who wants to know only of their ids."""
        if self.shards is not None:
            self.shards.lies = True
        try:
            yield
        finally:
            if self.shards is not None:
                self.shards.lies = False

    def compile(self) -> list[Undo]:
        """The model, as model.compile does."""
        before = self.model._compiled_call_impl
        self.model.compile()
        return [lambda: setattr(self.model, "_compiled_call_impl", before)]
