"""A dense optimizer's step on the rows of a table that a batch has used.

A row's missed steps have gradients of zero, so what they do to it follows from its weights, its
state and the steps' learning rates alone:

- SGD and RMSprop's momentum are linear: the missed steps are one 2x2 matrix.
- Adam's are a sum of a_j / (b_j sqrt(v) + eps), in which the b_j fall slowly, or by the bias
  correction quickly: a series of 16 terms, which leaves out at most 3e-7 of the sum. Where it would
  leave out more, as with a beta2 far from one, the steps are made one by one. Behind `horizon`
  steps the mean has decayed to nothing.
- With weight decay in the gradient, Adam, RMSprop and Adagrad are taken step by step.

A table of bfloat16 with lower halves beside it (Split-SGD of Kalamkar et al. 2020) is stepped as
the float32 numbers that both make, bit for bit.

Tables on a CPU are stepped by the C extension, others by Triton kernels, or by torch's operators
where there is no Triton or it fails. There nothing that is done as rows are read waits for the
device. Where the extension is absent, `available` says no, and the optimizer takes all rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from typing import Any, NamedTuple

import torch

from flatout.kernels import absent, table_rows_operators, triton_rows
from flatout.kernels.openmp import team
from flatout.kernels.table import Table

try:
    from flatout.kernels import _table_rows as _c
except ImportError:
    _c = None  # type: ignore[assignment]

RULES = {"adam": 0, "sgd": 1, "rmsprop": 2, "adagrad": 3}
"""The optimizers by which rows can be stepped."""

_NOTHING = 2.0**-30  # of what a mean was, is what can be left out of the sum of its decay
_COLUMNS, _OF_MISSED = 14, 24
_WIDEST = 512  # bits of vectors that kernels may use: fewer change no bit of a result
_Addresses = tuple[int, int, int, int, int, int, int, int, float, int, int, int]


def available() -> bool:
    """Whether the extension is there; the first time that it is not, a warning says so."""
    absent.warn_without(_c)
    return _c is not None and absent.WANTED


def _by_extension(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu


def is_deferred(table: torch.Tensor) -> bool:
    """Whether what is read of a table is known to its device alone, for which no one waits."""
    return not _by_extension(table)


def is_fast_on(device: torch.device) -> bool:
    """Whether kernels step rows there, and not torch's operators one after another."""
    return device.type == "cpu" or triton_rows.kernels_for(device) is not None


class Groups(NamedTuple):
    """The places at which each row of a table is used.

    Attributes:
        rows: int64, rising.
        places: int64, all places in the order of their rows, and of a row in their own order.
        starts: int64, where the places of each row begin, and their end.
    """

    rows: torch.Tensor
    places: torch.Tensor
    starts: torch.Tensor


def group(ids: torch.Tensor, size: int) -> Groups:
    """Find the rows that are used, and where.

    Args:
        ids: int64 of any shape.
        size: how many rows the table has.

    Raises:
        IndexError: an id is not in 0..size-1.
    """
    if not _by_extension(ids):
        return Groups(*table_rows_operators.group(ids, size))
    ids = ids.detach().reshape(-1).contiguous()
    rows, places = torch.empty_like(ids), torch.empty_like(ids)
    starts = torch.empty(len(ids) + 1, dtype=torch.int64)
    addresses = (rows.data_ptr(), places.data_ptr(), starts.data_ptr())
    count = _c.group(ids.data_ptr(), len(ids), size, *addresses)
    return Groups(rows[:count], places, starts[: count + 1])


class GroupsByRank(NamedTuple):
    """Groups of rows in the order of the ranks that own them, and of a rank in rising order.

    Attributes:
        groups: as `group` finds them, in this order.
        local: int64, where each row lies among its owner's.
        numbers: int64, of each place which of the rows is used there.
        counts: how many of the rows each rank owns.
    """

    groups: Groups
    local: torch.Tensor
    numbers: torch.Tensor
    counts: list[int]


def group_by_rank(groups: Groups, first: int, ranks: int, shift: int) -> GroupsByRank:
    """Put groups in the order of the ranks that own their rows.

    Args:
        groups: as `group` finds them.
        first: the rank that owns the first rows; the next are the next rank's.
        ranks: how many there are.
        shift: of so many rows at a time, as a power of two.
    """
    rows, places, starts = (torch.empty_like(group) for group in groups)
    local, numbers = torch.empty_like(rows), torch.empty_like(places)
    counts = torch.empty(ranks, dtype=torch.int64)
    _c.deal(
        groups.rows.data_ptr(),
        groups.places.data_ptr(),
        groups.starts.data_ptr(),
        len(rows),
        first,
        ranks,
        shift,
        rows.data_ptr(),
        places.data_ptr(),
        starts.data_ptr(),
        local.data_ptr(),
        numbers.data_ptr(),
        counts.data_ptr(),
    )
    return GroupsByRank(Groups(rows, places, starts), local, numbers, counts.tolist())


def numbers_in(groups: Groups) -> torch.Tensor:
    """Of each place, which of the rows is used there: int64."""
    counts, numbers = groups.starts.diff(), torch.empty_like(groups.places)
    rows = torch.arange(len(counts), device=counts.device)
    numbers[groups.places] = rows.repeat_interleave(counts)
    return numbers


def sum_rows(values: torch.Tensor, groups: Groups) -> torch.Tensor:
    """The sum of the values of each row, in the order of their places.

    Args:
        values: float32 of shape (places, width); bfloat16 is added up in float32.
        groups: of these places.

    Returns:
        of shape (rows, width), and of the same dtype.
    """
    if values.dtype is torch.bfloat16:
        return sum_rows(values.float(), groups).to(values.dtype)
    if not _by_extension(values):
        return _sums(values, groups.places, groups.starts)
    values = values.contiguous()
    out = torch.empty(len(groups.rows), values.shape[1])
    _c.sum_rows(
        values.data_ptr(),
        groups.places.data_ptr(),
        groups.starts.data_ptr(),
        out.data_ptr(),
        len(out),
        out.shape[1],
        *team(),
    )
    return out


class Read(NamedTuple):
    """A gradient of a table on a device, as it was read.

    Attributes:
        ids: int64 of shape (places,), of which several may be the same.
        values: of shape (places, width).
        size: how many rows the table has.
    """

    ids: torch.Tensor
    values: torch.Tensor
    size: int


def sum_tables(
    reads: Sequence[Read], bad: torch.Tensor
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], bool]:
    """The rows of several tables on one device, rising, and the sum of the values of each.

    One sort does for all of them, and the host waits for the device once.

    Args:
        reads: of which several may have the same ids.
        bad: of `known_ids`.

    Returns:
        rows and values of each table, and whether an id was bad.
    """
    sorted_reads = table_rows_operators.SortedReads([(read.ids, read.size) for read in reads], bad)
    sums: list[tuple[torch.Tensor, torch.Tensor]] = [(bad, bad)] * len(reads)
    alike: dict[tuple[int, torch.dtype], list[int]] = {}
    for number, item in enumerate(reads):
        alike.setdefault((item.values.shape[1], item.values.dtype), []).append(number)
    for (_, dtype), numbers in alike.items():
        # In the order of the lists of ids, of which each is read once, all are one.
        lists = [sorted_reads.numbers[number] for number in numbers]
        if lists == list(range(len(sorted_reads.rows))):
            values = [reads[number].values for number in numbers]
            whole = values[0] if len(values) == 1 else torch.cat(values)
            joint = _sums(whole, sorted_reads.places, sorted_reads.starts).to(dtype)
            parts = list(torch.split(joint, sorted_reads.counts))
        else:
            parts = [
                _sums(reads[number].values, *sorted_reads.own(of)).to(dtype)
                for number, of in zip(numbers, lists, strict=True)
            ]
        for number, of, part in zip(numbers, lists, parts, strict=True):
            sums[number] = sorted_reads.rows[of], part
    return sums, sorted_reads.is_bad


def _sums(values: torch.Tensor, places: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """float32 sums on a device."""
    kernels = triton_rows.kernels_for(values.device)
    if kernels is not None and kernels.takes(values.shape[1]):
        try:
            sums: torch.Tensor = kernels.sum_rows(values, places, starts)
            return sums
        except Exception as error:
            triton_rows.give_up(error)
    return table_rows_operators.sum_rows(values.float(), places, starts)


def in_float32(number: float) -> float:
    """As kernels round it: torch's, Keras' on torch and these."""
    return float(torch.tensor(number, dtype=torch.float32))


class Step(NamedTuple):
    """The numbers of one step of a rule.

    Attributes:
        rate: learning rate; Adam's is divided by the bias correction of the mean.
        root: what multiplies the root of Adam's squares: one over the root of their correction.
        first: Adam's beta1; the momentum of others.
        second: Adam's beta2; RMSprop's alpha.
        keep: what decoupled weight decay leaves of a weight.
        decay: weight decay that is added to the gradient.
        nesterov: whether momentum is Nesterov's.
        first_rest: what a gradient counts in Adam's mean.
        second_rest: what its square counts in the squares of Adam and RMSprop.
        scale: what a gradient is multiplied by on its way to the momentum of SGD and RMSprop.
        within: what is added to the squares of RMSprop and Adagrad before their root is taken.
    """

    rate: float
    root: float = 1.0
    first: float = 0.0
    second: float = 0.0
    keep: float = 1.0
    decay: float = 0.0
    nesterov: bool = False
    first_rest: float = 0.0
    second_rest: float = 0.0
    scale: float = 1.0
    within: float = 0.0


class Steps:
    """The steps that were made since all rows were at `base`.

    Args:
        rule: one of RULES.
        base: number of the step at which all rows are.
        room: how many steps can be kept.

    Attributes:
        now: number of the last step that all its tables know of.
    """

    def __init__(self, rule: str, base: int, room: int) -> None:
        self.rule, self._room = RULES[rule], room
        self._followed: tuple[tuple[int, int, Step], Steps] | None = None
        self._mirrors: dict[torch.device, _Mirror] = {}
        self._told: dict[int, tuple[Table, torch.Tensor]] = {}
        self._steps = torch.zeros(room + 1, _COLUMNS, dtype=torch.float64)
        self._missed = torch.zeros(room + 1, _OF_MISSED, dtype=torch.float64)
        self.restart(base)

    def restart(self, base: int) -> None:
        """Forget all steps: every row is at `base`."""
        self.base = self.now = base
        self._logs = (0.0, 0.0, 0.0)
        self._nothing_decays = True
        self._horizon = 0
        self._steps[0].zero_()
        self._pass()

    @property
    def is_full(self) -> bool:
        """Whether no other step can be kept."""
        return self.now - self.base >= self._room

    def write(self, step: Step) -> None:
        """Say what the step after `now` is, for `apply`."""
        logs = (step.first, step.second, step.keep)
        self._logs_then = tuple(
            total + (math.log2(item) if item > 0 else -1e6)
            for total, item in zip(self._logs, logs, strict=True)
        )
        self._nothing_decays &= step.decay == 0
        self._horizon = max(self._horizon, self._horizon_of(step))
        numbers = (*step[:6], *self._logs_then, *map(float, step[6:]))
        self._steps[self.now + 1 - self.base] = torch.tensor(numbers, dtype=torch.float64)
        self._changed(self.now + 1)

    def _horizon_of(self, step: Step) -> int:
        if self.rule == RULES["sgd"] and step.decay:
            return self._room
        ratio = step.first
        if self.rule == RULES["adam"]:
            ratio = step.first / math.sqrt(step.second) if step.second > 0 else math.inf
        if ratio >= 1:
            return self._room
        return math.ceil(math.log2(_NOTHING) / math.log2(ratio)) if ratio > 0 else 1

    def followed_by(self, step: Step) -> Steps:
        """These steps and one behind them, of which these take no note; made once."""
        made = self.base, self.now, step
        if self._followed is None or self._followed[0] != made:
            result = copy(self)
            result._steps, result._missed = self._steps.clone(), self._missed.clone()
            result._mirrors, result._told = {}, {}
            result.write(step)
            result.advance()
            self._followed = made, result
        return self._followed[1]

    def advance(self) -> None:
        """Go on to the step that was written."""
        self._logs = self._logs_then  # type: ignore[assignment]
        self.now += 1
        self._pass()

    def _pass(self) -> None:
        addresses = (self._steps.data_ptr(), self._missed.data_ptr())
        _c.pass_step(*addresses, self.base, self.now, self._horizon, self.rule)
        self._changed(max(self.base, self.now - self._horizon))

    def _changed(self, step: int) -> None:
        """Numbers of this step, or of those behind it, are others."""
        for mirror in self._mirrors.values():
            mirror.first = min(mirror.first, step - self.base)

    def bring(self, table: Table, rows: torch.Tensor | None) -> None:
        """Bring rows to `now`.

        Args:
            table: whose rows.
            rows: int64, each once; None for all.
        """
        if _by_extension(table.weights):
            self._call([_addresses(table, rows, None)])
        else:
            self._on_device([Change(table, rows, None)])

    def bring_ids(self, table: Table, ids: torch.Tensor, bad: torch.Tensor) -> torch.Tensor:
        """Bring the rows of ids to `now`, on a device.

        Args:
            table: whose rows.
            ids: whole numbers of shape (places,), of which several may be the same.
            bad: as that of `known_ids`.

        Returns:
            as `known_ids`.
        """
        device = table.weights.device
        kernels = triton_rows.kernels_for(device)
        if len(ids) and kernels is not None and kernels.takes(table.weights.shape[1]):
            ids = ids.contiguous()
            known = torch.empty(ids.shape, dtype=torch.int64, device=device)
            try:
                there = self._described(kernels, table)
                mirror = self._on(device)
                kernels.bring_ids(table, there, ids, known, bad, *mirror, **self._numbers())
                return known
            except Exception as error:
                triton_rows.give_up(error)
        known = table_rows_operators.known_ids(ids, len(table.last), bad)
        self._by_operators(device).bring(table, known)
        return known

    def _described(self, kernels: Any, table: Table) -> torch.Tensor:
        """What kernels are told of a table that is read."""
        address = table.weights.data_ptr()
        result = self._told.get(address)
        if result is None or result[0] is not table:
            result = self._told[address] = table, kernels.describe(table)
        return result[1]

    def apply(self, changes: Sequence[Change]) -> None:
        """Bring rows of tables to `now`, and make the step that was written."""
        self._call(
            [_addresses(*change) for change in changes if _by_extension(change.table.weights)]
        )
        others = [change for change in changes if not _by_extension(change.table.weights)]
        for device in dict.fromkeys(item.table.weights.device for item in others):
            self._on_device([item for item in others if item.table.weights.device == device])

    def _on_device(self, changes: Sequence[Change]) -> None:
        """On one device, all with gradients or none."""
        device = changes[0].table.weights.device
        kernels = triton_rows.kernels_for(device)
        left = list(changes)
        if kernels is not None:
            for own in kernels.launches(changes):
                try:
                    kernels.step_rows(own, *self._on(device), **self._numbers())
                except Exception as error:
                    triton_rows.give_up(error)
                    break
                done = set(map(id, own))
                left = [item for item in left if id(item) not in done]
        for table, rows, gradients in left:
            if gradients is None:
                self._by_operators(device).bring(table, rows)
            else:
                assert rows is not None
                step = self._steps[self.now + 1 - self.base]
                self._by_operators(device).apply(table, rows, gradients, step)

    def _numbers(self) -> dict[str, Any]:
        """Of the steps, as kernels take them."""
        is_stepwise = not self._nothing_decays and self.rule != RULES["sgd"]
        numbers = {"rule": self.rule, "base": self.base, "now": self.now}
        return {**numbers, "is_stepwise": is_stepwise}

    def _on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The steps, with that which was written, and those behind each, on a device."""
        mirror = self._mirrors.get(device)
        if mirror is None:
            both = (torch.empty_like(item, device=device) for item in (self._steps, self._missed))
            mirror = self._mirrors[device] = _Mirror(*both)
        end = min(self.now + 2 - self.base, len(self._steps))
        if mirror.first < end:
            # The driver has taken them when it returns, and lets the device go on meanwhile.
            for there, here in ((mirror.steps, self._steps), (mirror.missed, self._missed)):
                there[mirror.first : end].copy_(here[mirror.first : end], non_blocking=True)
            mirror.first = len(self._steps)
        return mirror.steps, mirror.missed

    def _by_operators(self, device: torch.device) -> table_rows_operators.Passed:
        """What was made until now; the same object for all tables of a step."""
        mirror, made = self._on(device), (self.now, self._nothing_decays)
        held = self._mirrors[device]
        if held.passed is None or held.passed[0] != made:
            count = self.now - self.base + 1
            passed = table_rows_operators.Passed(
                self._steps[:count], self._missed[:count], *mirror, **self._numbers()
            )
            held.passed = made, passed
        return held.passed[1]

    def _call(self, tables: list[_Addresses]) -> None:
        addresses = (self._steps.data_ptr(), self._missed.data_ptr())
        numbers = (self.base, self.now, self.rule)
        _c.step_rows(tables, *addresses, *numbers, self._nothing_decays, _WIDEST, *team())


class Change(NamedTuple):
    """What a step changes of a table.

    Attributes:
        table: whose rows.
        rows: int64, each once, contiguous; None for all, of which none has a gradient.
        gradients: float32 of shape (rows, width), contiguous; None where rows are but brought.
    """

    table: Table
    rows: torch.Tensor | None
    gradients: torch.Tensor | None


class _Mirror:
    """Steps where a table is, of which those from `first` on are to be sent."""

    def __init__(self, steps: torch.Tensor, missed: torch.Tensor) -> None:
        self.steps, self.missed, self.first = steps, missed, 0
        self.passed: tuple[tuple[int, bool], table_rows_operators.Passed] | None = None


def _addresses(
    table: Table, rows: torch.Tensor | None, gradients: torch.Tensor | None
) -> _Addresses:
    """Of tensors that live until the extension has returned."""
    lower = table.lower or (None, None, None)
    return (
        table.weights.data_ptr(),
        _address(table.first),
        _address(table.second),
        table.last.data_ptr(),
        _address(rows),
        _address(gradients),
        table.last.numel() if rows is None else rows.numel(),
        table.weights.shape[1],
        table.epsilon,
        _address(lower[0]),
        _address(lower[1]),
        _address(lower[2]),
    )


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
