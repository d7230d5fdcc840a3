"""A dense optimizer's step on the rows of a table that a batch has used.

A row's missed steps have gradients of zero. Their effect on the row follows from its weights, its
state and the learning rates of the steps:

- SGD and RMSprop's momentum are linear: the missed steps are one 2x2 matrix.
- Adam's missed steps are a sum of a_j / (b_j sqrt(v) + eps). The b_j fall slowly, or quickly
  through the bias correction. A series of 16 terms leaves out at most 3e-7 of the sum. If it would
  leave out more, as with a beta2 far from one, the steps are made one by one. After `horizon` steps
  the mean has decayed to nothing.
- With weight decay in the gradient, Adam, RMSprop and Adagrad are taken step by step.

A table of bfloat16 may have a second table of lower halves (Split-SGD of Kalamkar et al. 2020). The
two together are stepped as float32 numbers, bit for bit.

Tables on a CPU are stepped by the C extension. If the extension is absent, `available` returns
False, and the optimizer steps all rows. Tables on a GPU are stepped whole, which is faster there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from flatout.kernels import missing_extension
from flatout.kernels.openmp import team

_c = missing_extension.optional("_table_rows")

RULES = {"adam": 0, "sgd": 1, "rmsprop": 2, "adagrad": 3}
"""The optimizers by which rows can be stepped."""

# the rest of a mean's decay below which it is left out of the sum, as a fraction of the mean
_NOTHING = 2.0**-30
_COLUMNS, _OF_MISSED = 14, 24
_Addresses = tuple[int, int, int, int, int, int, int, int, float, int, int, int]


def available() -> bool:
    return _c is not None


class LowerBits(NamedTuple):
    """The lower 16 bits of a bfloat16 table's values; the table has the upper 16 bits.

    Attributes:
        weights: bfloat16 of shape (rows, width), contiguous, whose bits are no numbers of their
            own; as are the others.
        first: lower bits of the table's `first`, or None.
        second: lower bits of the table's `second`, or None.
    """

    weights: torch.Tensor
    first: torch.Tensor | None
    second: torch.Tensor | None


class Table(NamedTuple):
    """A table with its optimizer's state.

    Attributes:
        weights: float32 of shape (rows, width), contiguous, as are the others; bfloat16 if `lower`
            is set.
        first: Adam's mean, the momentum of SGD and RMSprop, Adagrad's sum; or None.
        second: the squares of Adam and RMSprop; or None.
        last: int32 of shape (rows,), the last step that each row has made.
        epsilon: the constant that the rule adds to the root.
        lower: lower halves of all values; None for float32.
    """

    weights: torch.Tensor
    first: torch.Tensor | None
    second: torch.Tensor | None
    last: torch.Tensor
    epsilon: float
    lower: LowerBits | None = None


def joined(upper: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
    """Return the float32 numbers of two bfloat16 halves of the same shape."""
    low = lower.view(torch.int16).to(torch.int32) & 0xFFFF
    return (upper.view(torch.int16).to(torch.int32) << 16 | low).view(torch.float32)


def halves(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the upper and lower 16 bits of float32 numbers, each as bfloat16 of their shape."""
    bits = values.contiguous().view(torch.int32)
    low = (bits & 0xFFFF).to(torch.int16)
    return (bits >> 16).to(torch.int16).view(torch.bfloat16), low.view(torch.bfloat16)


class Groups(NamedTuple):
    """The places at which each row of a table is used.

    Attributes:
        rows: int64, rising.
        places: int64, all places in the order of their rows, in rising order within a row.
        starts: int64, the begin of each row's places, and the end of the last.
    """

    rows: torch.Tensor
    places: torch.Tensor
    starts: torch.Tensor


def group(ids: torch.Tensor, size: int) -> Groups:
    ids = ids.detach().reshape(-1).contiguous()
    rows, places = torch.empty_like(ids), torch.empty_like(ids)
    starts = torch.empty(len(ids) + 1, dtype=torch.int64)
    addresses = (rows.data_ptr(), places.data_ptr(), starts.data_ptr())
    count = _c.group(ids.data_ptr(), len(ids), size, *addresses)
    return Groups(rows[:count], places, starts[: count + 1])


class GroupsByRank(NamedTuple):
    """Groups of rows in the order of the ranks that own them, in rising order within a rank.

    Attributes:
        groups: as `group` returns them, in this order.
        local: int64, the place of each row among its owner's rows.
        numbers: int64, for each place the index of the row that is used there.
        counts: for each rank, the number of these rows that it owns.
    """

    groups: Groups
    local: torch.Tensor
    numbers: torch.Tensor
    counts: list[int]


def group_by_rank(groups: Groups, first: int, ranks: int, shift: int) -> GroupsByRank:
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
    """Return for each place the index of the row that is used there, int64."""
    counts, numbers = groups.starts.diff(), torch.empty_like(groups.places)
    rows = torch.arange(len(counts))
    numbers[groups.places] = rows.repeat_interleave(counts)
    return numbers


def sum_rows(values: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Return the sum of the values of each row, in the order of their places."""
    if values.dtype is torch.bfloat16:
        return sum_rows(values.float(), groups).to(values.dtype)
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


def in_float32(number: float) -> float:
    """Round a number as kernels do: torch's, Keras' on torch and these."""
    return float(torch.tensor(number, dtype=torch.float32))


class Step(NamedTuple):
    """The numbers of one step of a rule.

    Attributes:
        rate: learning rate; Adam's is divided by the bias correction of the mean.
        root: factor of the root of Adam's squares: one over the root of their bias correction.
        first: Adam's beta1; the momentum of other rules.
        second: Adam's beta2; RMSprop's alpha.
        keep: factor that decoupled weight decay applies to a weight.
        decay: weight decay that is added to the gradient.
        nesterov: whether momentum is Nesterov's.
        first_rest: factor of a gradient in Adam's mean.
        second_rest: factor of its square in the squares of Adam and RMSprop.
        scale: factor of a gradient that is added to the momentum of SGD and RMSprop.
        within: number that is added to the squares of RMSprop and Adagrad under the root.
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
        room: number of steps that can be kept.

    Attributes:
        now: number of the last step that all its tables know.
    """

    def __init__(self, rule: str, base: int, room: int, widest: int = 512) -> None:
        self.rule, self._room, self._widest = RULES[rule], room, widest
        self._steps = torch.zeros(room + 1, _COLUMNS, dtype=torch.float64)
        self._missed = torch.zeros(room + 1, _OF_MISSED, dtype=torch.float64)
        self.restart(base)

    def restart(self, base: int) -> None:
        """Forget all steps, when every row is at `base`."""
        self.base = self.now = base
        self._logs = (0.0, 0.0, 0.0)
        self._nothing_decays = True
        self._horizon = 0
        self._steps[0].zero_()
        self._pass()

    @property
    def is_full(self) -> bool:
        """True if no other step can be kept."""
        return self.now - self.base >= self._room

    def write(self, step: Step) -> None:
        """Set the numbers of the step after `now`, for `apply`."""
        logs = (step.first, step.second, step.keep)
        self._logs_then = tuple(
            total + (math.log2(item) if item > 0 else -1e6)
            for total, item in zip(self._logs, logs, strict=True)
        )
        self._nothing_decays &= step.decay == 0
        self._horizon = max(self._horizon, self._horizon_of(step))
        numbers = (*step[:6], *self._logs_then, *map(float, step[6:]))
        self._steps[self.now + 1 - self.base] = torch.tensor(numbers, dtype=torch.float64)

    def _horizon_of(self, step: Step) -> int:
        if self.rule == RULES["sgd"] and step.decay:
            return self._room
        ratio = step.first
        if self.rule == RULES["adam"]:
            ratio = step.first / math.sqrt(step.second) if step.second > 0 else math.inf
        if ratio >= 1:
            return self._room
        return math.ceil(math.log2(_NOTHING) / math.log2(ratio)) if ratio > 0 else 1

    def advance(self) -> None:
        """Advance to the step that was written."""
        self._logs = self._logs_then  # type: ignore[assignment]
        self.now += 1
        self._pass()

    def _pass(self) -> None:
        addresses = (self._steps.data_ptr(), self._missed.data_ptr())
        _c.pass_step(*addresses, self.base, self.now, self._horizon, self.rule)

    def bring(self, table: Table, rows: torch.Tensor | None) -> None:
        """Bring rows to `now`.

        Args:
            table: the table of the rows.
            rows: int64, each once; None for all rows.
        """
        self._call([_addresses(table, rows, None)])

    def apply(self, changes: Sequence[Change]) -> None:
        """Bring rows of tables to `now`, and make the step that was written."""
        self._call([_addresses(*change) for change in changes])

    def _call(self, tables: list[_Addresses]) -> None:
        addresses = (self._steps.data_ptr(), self._missed.data_ptr())
        numbers = (self.base, self.now, self.rule)
        _c.step_rows(tables, *addresses, *numbers, self._nothing_decays, self._widest, *team())


class Change(NamedTuple):
    """The change of a table in a step.

    Attributes:
        table: the table of the rows.
        rows: int64, each once, contiguous; None for all rows, of which none has a gradient.
        gradients: float32 of shape (rows, width), contiguous; None if rows are only brought up to
            date.
    """

    table: Table
    rows: torch.Tensor | None
    gradients: torch.Tensor | None


def _addresses(
    table: Table, rows: torch.Tensor | None, gradients: torch.Tensor | None
) -> _Addresses:
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
