"""Steps tables by the rows that a batch has used, with the result of a dense optimizer.

A dense optimizer steps all rows of a table, also rows that no sample has used, because their
moments decay and move them. Here a row makes up for missed steps when it is read next
(kernels/table_rows). Before anyone reads the whole table (a state dict, an evaluation, the end),
`settle` brings all rows up to date.

Gradients are torch's sparse tensors with the rows that were read; no dense gradient is made. The
gradients of a row are summed in the order of the samples, so that results do not depend on the
number of threads.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from flatout.devices import huge_pages
from flatout.kernels import Change, Groups, LowerBits, Steps, Table, table_rows
from flatout.models import Lookup, table_weight, unwatch_table, watch_table
from flatout.optim.adapter import name_of, optimizer_adapter, rules_of, why_dense
from flatout.optim.by_row import ByRow
from flatout.optim.row_rules import RowRule, State
from flatout.optim.row_shards import RowShards

# _LOOKED_AT: unread rows of a table that are sampled to check whether their gradient is a multiple
# of their weights, as with L2. _MOST: fraction of these rows that must be such multiples.
_LOOKED_AT = 1024
_MOST = 0.5
# Steps that are kept for rows to make up for. When they are full, one pass over the table brings
# all rows up to date.
_ROOM = 4096


def why_whole(optimizers: Sequence[torch.optim.Optimizer], weight: torch.Tensor) -> str:
    """Return the reason why a table that is read by rows cannot be stepped by rows, or ""."""
    owners = [
        (optimizer, group)
        for optimizer in optimizers
        for group in optimizer.param_groups
        if any(parameter is weight for parameter in group["params"])
    ]
    if len(owners) != 1:
        return "several optimizers step it" if owners else "no optimizer steps it"
    return why_dense(*owners[0])


def steppable_rows(
    optimizers: Sequence[torch.optim.Optimizer], modules: Iterable[nn.Module]
) -> dict[torch.optim.Optimizer, list[nn.Parameter]]:
    """Return the tables of these modules that can be stepped by rows, by optimizer.

    Args:
        optimizers: the optimizers of the model.
        modules: modules that read their tables by rows only.
    """
    owners: dict[int, list[torch.optim.Optimizer]] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"] if not why_dense(optimizer, group) else ():
                owners.setdefault(id(parameter), []).append(optimizer)
    result: dict[torch.optim.Optimizer, list[nn.Parameter]] = {}
    weights: dict[Any, None] = dict.fromkeys(map(table_weight, modules))
    for weight in weights:
        of = owners.get(id(weight), [])
        if len(of) == 1:
            result.setdefault(of[0], []).append(weight)
    return result


class KeptTable:
    """A table, its optimizer's state, and a record of its rows that have missed steps."""

    def __init__(
        self,
        weight: nn.Parameter,
        rule: RowRule,
        grouped: Grouped,
        shards: RowShards | None = None,
    ) -> None:
        self.weight, self.rule, self.shards = weight, rule, shards
        self.steps: Steps | None = None
        self.table: Table | None = None
        self._grouped, self._size = grouped, len(weight)
        self._state: State = (None, None)  # the optimizer's state of all rows
        self._lower: LowerBits | None = None
        self._address = 0  # data pointer of the weights
        self._settled = -1  # the last step that all rows have made
        self._rows: torch.Tensor | None = None  # rows of the latest gradient

    def attach(self) -> None:
        watch_table(self.weight, self)
        self.rule.attach(self)
        if self.shards is not None:
            self.shards.reads(self.weight, self)

    def detach(self) -> None:
        unwatch_table(self.weight)
        self.rule.detach()
        self.bring_all()
        self.steps = self.table = None

    def whole(self) -> None:
        """Bring all rows up to date."""
        if self.is_spread:
            assert self.shards is not None
            self.shards.refuse(self.weight)
        self.bring_all()

    @property
    def values(self) -> torch.Tensor:
        """The weights, without a watcher that notices reads."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.weight.detach()

    @property
    def is_spread(self) -> bool:
        """True if this rank holds only its own rows now."""
        return self.shards is not None and self.weight in self.shards.spread

    def by_rows(self, ids: torch.Tensor) -> Lookup | None:
        if ids.is_floating_point():
            return None
        try:
            groups = self._grouped.of(ids.detach(), self._size)
        except IndexError:
            return None
        if self.shards is not None and self.is_spread:
            dealt = self.shards.dealt(self.weight, groups)
            block = self.shards.fetch(self.weight, dealt)
            return _Lookup(self, ids, dealt.groups, _FetchedRows(block, dealt.numbers))
        self._bring(groups.rows)
        return _Lookup(self, ids, groups, None)

    def _bring(self, rows: torch.Tensor | None) -> bool:
        steps, table = self.steps, self.table
        if steps is None or table is None or steps.now <= self._settled:
            return False
        steps.bring(table, rows)
        if rows is None:
            self._settled = steps.now
        return True

    # -- rows that this rank owns, for others --------------------------------------------------

    def read(self, local: torch.Tensor, groups: Groups) -> torch.Tensor:
        assert self.shards is not None
        self._bring(groups.rows)
        return self.shards.part(self.weight, self.values).index_select(0, local)

    # -- gradients -----------------------------------------------------------------------------

    def places_of(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the places in `table` of the rows of the gradient."""
        if self.shards is None or not self.is_spread:
            return rows
        return self.shards.places(self.weight)

    def gradient(
        self, rows: torch.Tensor, values: torch.Tensor, *, rise: bool = True
    ) -> torch.Tensor:
        """Return the table's sparse gradient of these rows, each of which occurs once.

        If rows do not rise, `rise` must be False: torch would add up two such gradients wrongly if
        they were marked as coalesced.
        """
        self._rows = rows
        return torch.sparse_coo_tensor(
            rows[None], values, self.weight.shape, check_invariants=False, is_coalesced=rise
        )

    def gather(self) -> None:
        gradient = self.weight.grad
        if gradient is None or gradient.is_coalesced():
            return
        rows = gradient._indices()[0]
        known = self._rows
        if known is not None and (rows.data_ptr(), len(rows)) == (known.data_ptr(), len(known)):
            gradient._coalesced_(True)  # autograd does not pass the mark on
            return
        groups = table_rows.group(rows, len(self.weight))
        values = table_rows.sum_rows(gradient._values(), groups)
        self.weight.grad = self.gradient(groups.rows, values)

    def holds(self, state: State, count: int | None) -> bool:
        """Return whether `table` has this state, is at this step, and has the current options."""
        table = self.table
        return (
            table is not None
            and self.steps is not None
            and count in (None, self.steps.now)
            and self._state[0] is state[0]
            and self._state[1] is state[1]
            and _same(self._lower, self.rule.lower())
            and table.epsilon == self.rule.epsilon
            and self._address == self.weight.data_ptr()
        )

    def bring_all(self) -> None:
        """Bring the rows of this rank up to date."""
        if self._bring(None):
            torch.autograd.graph.increment_version(self.weight)

    def begin(self, state: State, steps: Steps) -> None:
        """Record steps from here on. All rows must have made the last step."""
        self.steps, self._settled = steps, steps.now
        self._state, self._address = state, self.weight.data_ptr()
        self._lower = self.rule.lower()
        self._lay_out()

    def _lay_out(self) -> None:
        assert self.steps is not None
        tensors = [self.values, *self._state]
        if self.shards is not None and self.is_spread:
            weight, shards = self.weight, self.shards
            tensors = [
                None if tensor is None else shards.part(weight, tensor) for tensor in tensors
            ]
        weights, first, second = tensors
        assert weights is not None
        last = torch.full((len(weights),), self.steps.now, dtype=torch.int32)
        self.table = Table(weights, first, second, last, self.rule.epsilon, self._lower)

    def spread(self) -> None:
        if self.shards is None or self.is_spread:
            return
        self.whole()
        self.shards.part(self.weight, self.values)
        if self.table is not None:
            self._lay_out()

    def gather_rows(self) -> None:
        if self.shards is None or not self.is_spread:
            return
        self.bring_all()
        self.shards.gather(self.weight)
        if self.table is not None:
            self._lay_out()
        torch.autograd.graph.increment_version(self.weight)


def _same(lower: LowerBits | None, other: LowerBits | None) -> bool:
    return all(a is b for a, b in zip(lower or (None,) * 3, other or (None,) * 3, strict=True))


class Grouped:
    """Grouped rows of the ids that were read since the last step, each sorted once.

    Several tables can be read by the same ids, such as the two tables of a factorization machine.
    """

    # Maximum number of groups that are kept. An evaluation makes no steps that would clear them.
    _MOST = 512

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[torch.Tensor, int, Groups]] = {}

    def of(self, ids: torch.Tensor, size: int) -> Groups:
        # Ids may be overwritten in place. Then a new tensor's version differs, not its address.
        storage = ids.untyped_storage()._cdata
        key = (storage, ids.data_ptr(), ids.dtype, ids.shape, ids.stride(), size)
        version = -1 if ids.is_inference() else ids._version
        result = self._known.get(key)
        if result is not None and result[1] == version:
            return result[2]
        groups = table_rows.group(ids.to(torch.int64), size)
        if version >= 0:
            if len(self._known) >= self._MOST:
                self._known.clear()
            # Keeps the ids alive, so that no other ids get this address.
            self._known[key] = ids, version, groups
        return groups

    def rows_of(self, size: int) -> list[torch.Tensor]:
        return [groups.rows for key, (_, _, groups) in self._known.items() if key[-1] == size]

    def forget(self) -> None:
        self._known.clear()


class _FetchedRows(NamedTuple):
    """Rows that were fetched from other ranks.

    Attributes:
        block: float32 of shape (rows, width).
        numbers: int64, for each id the index of its row in `block`.
    """

    block: torch.Tensor
    numbers: torch.Tensor


class _Lookup(NamedTuple):
    kept: KeptTable
    ids: torch.Tensor
    groups: Groups
    fetched: _FetchedRows | None  # in the order of `groups`; None if this rank holds the table

    def embedding(self, padding_idx: int | None, scale_grad_by_freq: bool) -> torch.Tensor:
        return _Gathered.apply(self.kept.weight, *self, padding_idx, scale_grad_by_freq)  # type: ignore[no-any-return,no-untyped-call]

    def embedding_bag(
        self, offsets: torch.Tensor | None, padding_idx: int | None, **options: Any
    ) -> torch.Tensor:
        groups, fetched = self.groups, self.fetched
        if fetched is None:
            order, rows, numbers = None, groups.rows, table_rows.numbers_in(groups)
        else:
            order = groups.rows.argsort()
            rows = groups.rows[order]
            numbers = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
            numbers = numbers[fetched.numbers]
        if padding_idx is not None:
            place = int(torch.searchsorted(rows, padding_idx))
            is_there = place < len(rows) and int(rows[place]) == padding_idx
            padding_idx = place if is_there else None
        return F.embedding_bag(
            numbers.reshape(self.ids.shape),
            _Compact.apply(self.kept.weight, self.kept, groups, fetched, order),  # type: ignore[no-untyped-call]
            None if offsets is None else offsets.to(numbers.dtype),
            padding_idx=padding_idx,
            **options,
        )


class _Gathered(torch.autograd.Function):
    """Rows of a table by ids, with a sparse gradient of these rows."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: torch.Tensor,
        kept: KeptTable,
        ids: torch.Tensor,
        groups: Groups,
        fetched: _FetchedRows | None,
        padding_idx: int | None,
        scale_grad_by_freq: bool,
    ) -> torch.Tensor:
        ctx.kept, ctx.groups, ctx.ids = kept, groups, ids
        ctx.padding_idx, ctx.scale_grad_by_freq = padding_idx, scale_grad_by_freq
        if fetched is not None:
            return F.embedding(fetched.numbers.reshape(ids.shape), fetched.block)
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():  # the gradient is to be differentiated itself
            options = (len(ctx.kept.weight), ctx.padding_idx, ctx.scale_grad_by_freq)
            return _whole_gradient(gradient, ctx.ids, *options), *[None] * 6
        groups = ctx.groups
        rows = groups.rows
        values = table_rows.sum_rows(gradient.reshape(-1, gradient.shape[-1]), groups)
        if ctx.scale_grad_by_freq:
            values /= groups.starts.diff()[:, None]
        if ctx.padding_idx is not None:
            others = rows != ctx.padding_idx
            rows, values = rows[others], values[others]
        gradient = ctx.kept.gradient(rows, values, rise=not ctx.kept.is_spread)
        return gradient, None, None, None, None, None, None


def _whole_gradient(
    gradient: torch.Tensor,
    ids: torch.Tensor,
    rows: int,
    padding_idx: int | None,
    scale_grad_by_freq: bool,
) -> torch.Tensor:
    """Return a table's dense gradient, made by torch so that it can be differentiated."""
    padding = -1 if padding_idx is None else padding_idx
    result: torch.Tensor = torch.ops.aten.embedding_dense_backward(
        gradient, ids, rows, padding, scale_grad_by_freq
    )
    return result


class _Compact(torch.autograd.Function):
    """The rows that a batch uses, once each and rising, for an operator that reads a table."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: torch.Tensor,
        kept: KeptTable,
        groups: Groups,
        fetched: _FetchedRows | None,
        order: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.kept, ctx.rows, ctx.order = kept, groups.rows, order
        if fetched is None or order is None:
            return weight.index_select(0, groups.rows)
        return fetched.block.index_select(0, order)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        values = gradient.contiguous()
        if ctx.order is not None:
            values = torch.empty_like(values).index_copy_(0, ctx.order, values)
        result = ctx.kept.gradient(ctx.rows, values, rise=ctx.order is None)
        return result, None, None, None, None


class TouchedRows:
    """The tables of one optimizer.

    Args:
        optimizer: stays the owner of options and state.
        weights: tables of its parameter groups that are read by rows.
        shards: shards tables over ranks in training; None if each rank has all rows.

    Attributes:
        left: tables that were left to the optimizer later, each with the reason.
        by_optimizer: whether the optimizer steps rows itself, and no row misses a step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        weights: Iterable[nn.Parameter],
        shards: RowShards | None = None,
    ) -> None:
        self.by_optimizer = isinstance(optimizer, ByRow)
        shards = None if self.by_optimizer else shards
        self._optimizer, self.shards = optimizer, shards
        self.left: dict[torch.Tensor, str] = {}
        self._grouped = grouped = Grouped()
        self._kept = [
            KeptTable(weight, rule, grouped, shards if shards and shards.takes(weight) else None)
            for weight, rule in rules_of(optimizer, weights)
        ]
        self._undo: list[Callable[[], Any]] = []

    @property
    def weights(self) -> list[nn.Parameter]:
        return [kept.weight for kept in self._kept]

    def attach(self) -> None:
        """Bring rows up to date before each read, and make sparse gradients."""
        _leave_invariants()
        for kept in self._kept:
            kept.attach()
        self._undo = [
            self._optimizer.register_state_dict_pre_hook(lambda _: self.settle()).remove,
            self._optimizer.register_load_state_dict_pre_hook(lambda *_: self.settle()).remove,
        ]

    def detach(self) -> None:
        """Bring all rows up to date, and leave them to the optimizer."""
        for kept in self._kept:
            kept.detach()
        for undo in self._undo:
            undo()

    def settle(self) -> None:
        """Bring all rows up to date."""
        for kept in self._kept:
            kept.whole()

    def spread(self) -> None:
        """Keep only this rank's rows of tables that are sharded."""
        for kept in self._kept:
            kept.spread()

    def gather_rows(self) -> None:
        """Get the rows of all ranks. All ranks call this."""
        for kept in self._kept:
            kept.gather_rows()

    # -- a step ------------------------------------------------------------------------------

    def merge(self) -> None:
        """Coalesce each sparse gradient, before ranks add it up."""
        for kept in self._kept:
            if kept.weight.grad is not None and kept.weight.grad.is_sparse:
                kept.gather()

    def gather(self) -> bool:
        """Coalesce each table's gradient.

        Return whether a table was left to the optimizer. Its gradient is dense, because it was read
        in another way than by rows.
        """
        whole = [k for k in self._kept if k.weight.grad is not None and not k.weight.grad.is_sparse]
        for kept in whole:
            kept.detach()
            self._kept.remove(kept)
            self.left[kept.weight] = self._why_left(kept)
        for kept in self._kept:
            kept.gather()
        return bool(whole)

    def _why_left(self, kept: KeptTable) -> str:
        read = self._grouped.rows_of(len(kept.weight))
        return why_read_whole(self._optimizer, kept.weight, kept.weight.grad, read)

    def step(self) -> None:
        """Apply the gradients, and set them to None unless the optimizer steps rows itself.

        A table without a gradient stays as it is, as with torch's and Keras' optimizers.
        """
        self._grouped.forget()
        if not self.by_optimizer:
            with torch._C.DisableTorchFunctionSubclass():  # no watcher is needed in it
                self._step()

    def _step(self) -> None:
        used = [kept for kept in self._kept if kept.weight.grad is not None]
        for kept in self._kept:
            if kept.weight.grad is None and any(kept.steps is item.steps for item in used):
                kept.bring_all()
                kept.steps = None
        for kept in used:
            self._begin(kept)
        optimizer_adapter(self._optimizer).clip_rows([kept.weight for kept in used])
        # Step tables with the same options together.
        changes: dict[Steps, list[Change]] = {}
        for kept in used:
            assert kept.steps is not None
            assert kept.table is not None
            if kept.steps not in changes:
                changes[kept.steps] = []
                kept.steps.write(kept.rule.step(kept.steps.now + 1))
            gradient = kept.weight.grad
            assert gradient is not None
            rows, values = kept.places_of(gradient._indices()[0]), gradient._values()
            changes[kept.steps].append(Change(kept.table, rows, values.float().contiguous()))
        for steps, of_tables in changes.items():
            steps.apply(of_tables)
        for kept in used:
            torch.autograd.graph.increment_version(kept.weight)
            kept.weight.grad = None
            kept.rule.count_step()
        for steps in changes:
            steps.advance()
            if steps.is_full:
                self._restart(steps)

    def _begin(self, kept: KeptTable) -> None:
        rule = kept.rule
        state, count = rule.state(), rule.count()
        if kept.holds(state, count):
            return
        kept.bring_all()  # no effect if another state was loaded: all rows were up to date
        for values in () if kept.is_spread else (kept.weight, *state, *(rule.lower() or ())):
            if values is not None:
                huge_pages.move(values)
        count = count or 0
        steps = [item.steps for item in self._kept if item.steps and item.rule.shares(rule)]
        fresh = [steps for steps in steps if steps.base == steps.now == count]
        kept.begin(state, fresh[0] if fresh else Steps(rule.name, count, _ROOM))

    def _restart(self, steps: Steps) -> None:
        for kept in self._kept:
            if kept.steps is steps:
                kept.bring_all()
        steps.restart(steps.now)


def _leave_invariants() -> None:
    """Leave sparse gradients unchecked, as torch does by default. torch 2.11 warns without this."""
    checks = torch.sparse.check_sparse_tensor_invariants
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not checks.is_enabled():  # type: ignore[no-untyped-call]
            checks.disable()  # type: ignore[no-untyped-call]


def why_read_whole(
    optimizer: torch.optim.Optimizer,
    weight: nn.Parameter,
    gradient: torch.Tensor | None,
    read: Iterable[torch.Tensor],
) -> str:
    """Return the reason why a table has a dense gradient, as far as the gradient shows it.

    Args:
        optimizer: the optimizer that steps the table.
        weight: the table.
        gradient: a dense gradient, or None.
        read: rows that were looked up.
    """
    times = None if gradient is None else _times_itself(weight, gradient, read)
    if times is None:
        return "something reads all of it"
    why = "the loss reads all of it, as L2 does"
    ((_, rule),) = rules_of(optimizer, [weight])
    if rule.decay is None:
        return why
    decay = f"weight_decay={rule.decay + times:.3g}"
    return f"{why}; {name_of(optimizer)} with {decay} instead steps it by rows"


def _times_itself(
    weight: torch.Tensor, gradient: torch.Tensor, read: Iterable[torch.Tensor]
) -> float | None:
    is_unread = torch.ones(len(weight), dtype=torch.bool)
    for rows in read:
        is_unread[rows] = False
    places = is_unread.nonzero()[:_LOOKED_AT, 0]
    values, result = weight.detach()[places].double(), gradient[places].double()
    squares = values.square().sum(1)
    each = (values * result).sum(1)[squares > 0] / squares[squares > 0]
    if not len(each):
        return None
    times = each.median()
    near = (result - times * values).norm(dim=1) <= 1e-4 * result.norm(dim=1)
    return float(times) if times > 0 and near.double().mean() > _MOST else None
