# mypy: disable-error-code="untyped-decorator, no-untyped-def"
"""What `table_rows` does, as Triton kernels, for tables on a GPU: a step of all takes a launch.

The formulas and their order are those of _table_rows.c. One program takes one row, so that nothing
depends on the order in which programs run; a row's gradients are added up in portions of the order
of the samples.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import triton
import triton.language as tl

from flatout.kernels.table import Table

# As in table_rows.RULES.
_ADAM, _SGD, _RMSPROP = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# Columns of a step and of those behind it, as in table_rows.py.
_STEP, _MISSED = tl.constexpr(14), tl.constexpr(24)
_FIRST_LOGS, _SECOND_LOGS, _KEEP_LOGS = tl.constexpr(6), tl.constexpr(7), tl.constexpr(8)
_MOMENTS, _TERMS, _SIZE, _REST = (
    tl.constexpr(6),
    tl.constexpr(16),
    tl.constexpr(22),
    tl.constexpr(23),
)
_NEAR, _STEPWISE = tl.constexpr(3e-7), tl.constexpr(4)
# What is told of each table: addresses of weights, first, second, their lower halves, the steps
# that rows are at, which rows and their gradients; of which program its rows begin, how many rows
# it has, its width, epsilon.
_COLUMNS = tl.constexpr(13)
_LOWER, _LAST, _ROWS, _GRADIENTS = (
    tl.constexpr(3),
    tl.constexpr(6),
    tl.constexpr(7),
    tl.constexpr(8),
)
_START, _LENGTH, _WIDTH, _EPSILON = (
    tl.constexpr(9), tl.constexpr(10), tl.constexpr(11), tl.constexpr(12),
)  # fmt: skip
_WIDEST = 1 << 13  # a program has a row in its registers


class TableChange(Protocol):
    """Rows of one table: a `table_rows.Change`."""

    @property
    def table(self) -> Table:
        """On a GPU."""
        ...

    @property
    def rows(self) -> torch.Tensor | None:
        """int64, each once, contiguous; None for all."""
        ...

    @property
    def gradients(self) -> torch.Tensor | None:
        """float32 of shape (rows, width), contiguous; None where rows are but brought."""
        ...


def takes(width: int) -> bool:
    """Whether rows of this width fit."""
    return width <= _WIDEST


def launches(parts: Sequence[TableChange]) -> list[list[TableChange]]:
    """Those that go together in `step_rows`, without those whose rows are too wide."""
    alike: dict[tuple[int, bool, bool, bool], list[TableChange]] = {}
    for part in parts:
        if takes(part.table.weights.shape[1]):
            alike.setdefault(_kind(part.table), []).append(part)
    return list(alike.values())


def step_rows(
    parts: Sequence[TableChange],
    steps: torch.Tensor,
    missed: torch.Tensor,
    *,
    rule: int,
    is_stepwise: bool,
    base: int,
    now: int,
) -> None:
    """Bring rows to `now`; those with gradients make the step behind it.

    Args:
        parts: of `launches`; all with rows or none, and with gradients or none.
        steps: float64 of shape (steps, numbers), on their device, of which row 0 is that of `base`.
        missed: float64 of shape (steps, numbers): what those behind each step do to a row.
        rule: the number of one of `table_rows.RULES`.
        is_stepwise: whether missed steps are made one by one.
        base: number of the step at which all rows were.
        now: number of the last step.
    """
    result, programs = _addresses([(part.table, part.rows, part.gradients) for part in parts])
    kind, first = _kind(parts[0].table), parts[0]
    tables = torch.tensor(result, dtype=torch.int64).to(steps.device, non_blocking=True)
    unread = tables
    if not programs:
        return
    with _on(steps):
        _step_rows[(programs,)](
            tables, unread, unread, unread, steps, missed, base, now, len(parts),
            RULE=rule, IS_STEPWISE=is_stepwise, BY_IDS=False, TABLES=_power(len(parts)),
            HAS_ROWS=first.rows is not None, HAS_GRADIENTS=first.gradients is not None,
            **_constants(kind),
        )  # fmt: skip


def describe(table: Table) -> torch.Tensor:
    """What `bring_ids` is told of a table, on its device: the same for all its reads."""
    result, _ = _addresses([(table, None, None)])
    return torch.tensor(result, dtype=torch.int64).to(table.last.device)


def bring_ids(
    table: Table,
    described: torch.Tensor,
    ids: torch.Tensor,
    known: torch.Tensor,
    bad: torch.Tensor,
    steps: torch.Tensor,
    missed: torch.Tensor,
    *,
    rule: int,
    is_stepwise: bool,
    base: int,
    now: int,
) -> None:
    """Bring the rows of ids, of which several may be the same, to `now`.

    Args:
        table: whose rows.
        described: of `describe`.
        ids: whole numbers, contiguous.
        known: int64, gets the ids; in the place of those that the table has no row for, another.
        bad: int64 of shape (1,), becomes 1 where there is such an id.
        steps: as `step_rows`, as are the others.
        missed: of these.
        rule: of the table.
        is_stepwise: of the rule.
        base: of the steps.
        now: of the steps.
    """
    with _on(steps):
        _step_rows[(ids.numel(),)](
            described, ids, known, bad, steps, missed, base, now, 1,
            RULE=rule, IS_STEPWISE=is_stepwise, BY_IDS=True, TABLES=1, HAS_ROWS=False,
            HAS_GRADIENTS=False, **_constants(_kind(table)),
        )  # fmt: skip


def sum_rows(values: torch.Tensor, places: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """As `table_rows.sum_rows`: float32 sums of values of any floating dtype."""
    values = values.contiguous()
    out = values.new_empty(len(starts) - 1, values.shape[1], dtype=torch.float32)
    width = _power(values.shape[1])
    if len(out):
        with _on(values):
            _sum_rows[(len(out),)](
                values, places, starts, out, values.shape[1],
                PLACES=max(1, min(128, 4096 // width)), WIDTH=width,
            )  # fmt: skip
    return out


def _on(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Within, kernels are started on the device of a tensor."""
    return torch.cuda.device_of(tensor)  # type: ignore[no-untyped-call]


def _addresses(
    parts: Sequence[tuple[Table, torch.Tensor | None, torch.Tensor | None]],
) -> tuple[list[list[int]], int]:
    """What is told of tables, and how many rows there are."""
    result, start = [], 0
    for table, rows, gradients in parts:
        lower = table.lower or (None, None, None)
        tensors = (table.weights, table.first, table.second, *lower, table.last, rows, gradients)
        (epsilon,) = struct.unpack("q", struct.pack("d", table.epsilon))
        length, width = table.weights.shape
        result.append([*map(_address, tensors), start, length, width, epsilon])
        start += length if rows is None else len(rows)
    return result, start


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _kind(table: Table) -> tuple[int, bool, bool, bool]:
    """What kernels are compiled for."""
    is_split = table.lower is not None
    width = _power(table.weights.shape[1])
    return width, table.first is not None, table.second is not None, is_split


def _constants(kind: tuple[int, bool, bool, bool]) -> dict[str, Any]:
    names = ("WIDTH", "HAS_FIRST", "HAS_SECOND", "IS_SPLIT")
    return {**dict(zip(names, kind, strict=True)), "num_warps": max(1, min(8, kind[0] // 128))}


def _power(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


@triton.jit
def _number(step, place: tl.constexpr):
    return tl.load(step + place).to(tl.float32)


@triton.jit
def _one_step(w, m, v, gradient, step, epsilon, RULE: tl.constexpr, HAS_FIRST: tl.constexpr):
    """The numbers of a row after one step."""
    rate, root, of_first, of_second = (
        _number(step, 0), tl.load(step + 1), _number(step, 2), _number(step, 3),
    )  # fmt: skip
    keep, decay, nesterov = _number(step, 4), _number(step, 5), _number(step, 9)
    first_rest, second_rest = _number(step, 10), _number(step, 11)
    scale, within = _number(step, 12), _number(step, 13)
    gradient = gradient + decay * w
    kept = keep * w
    if RULE == _ADAM:
        correction = (1 / root).to(tl.float32)
        m = m + first_rest * (gradient - m)
        v = of_second * v + second_rest * gradient * gradient
        under = tl.div_rn(tl.sqrt_rn(v), correction + tl.zeros_like(v)) + epsilon
        w = kept - tl.div_rn(rate * m, under)
    elif RULE == _SGD:
        if HAS_FIRST:
            gradient = scale * gradient
            m = of_first * m + gradient
            moved = tl.where(nesterov != 0, gradient + of_first * m, m)
            w = kept - rate * moved
        else:
            w = kept - rate * gradient
    elif RULE == _RMSPROP:
        v = of_second * v + second_rest * gradient * gradient
        under = tl.sqrt_rn(v + within) + epsilon
        if HAS_FIRST:
            m = of_first * m + tl.div_rn(scale * gradient, under)
            w = kept - rate * m
        else:
            w = kept - tl.div_rn(rate * gradient, under)
    else:
        m = m + gradient * gradient
        w = kept - tl.div_rn(rate * gradient, tl.sqrt_rn(m + within) + epsilon)
    return w, m, v


@triton.jit
def _grown(to, since, place: tl.constexpr):
    """The product of a number over the steps between two."""
    return tl.exp2(tl.load(to + place) - tl.load(since + place))


@triton.jit
def _at_once(
    w, m, v, then, present, upto, passed, epsilon, RULE: tl.constexpr, HAS_FIRST: tl.constexpr
):
    """The numbers of a row after all steps that it missed."""
    keep = _grown(present, then, _KEEP_LOGS)
    behind = _grown(present, upto, _KEEP_LOGS)
    if RULE == _ADAM:
        x = tl.sqrt_rn(v) * _number(passed, 5)
        over = tl.div_rn(tl.zeros_like(x) + 1.0, x + epsilon)
        z = (x - epsilon) * over
        series = tl.zeros_like(x) + _number(passed, _MOMENTS + _TERMS - 1)
        for k in tl.static_range(_TERMS - 1):
            series = series * z + tl.load(passed + _MOMENTS + _TERMS - 2 - k).to(tl.float32)
        moved = tl.where(m == 0, 0.0, behind.to(tl.float32) * (series * over * m))
        w = keep.to(tl.float32) * w - moved
        m = m * _grown(present, then, _FIRST_LOGS).to(tl.float32)
        v = v * _grown(present, then, _SECOND_LOGS).to(tl.float32)
    elif RULE == _SGD or RULE == _RMSPROP:  # noqa: SIM109
        kept = (behind * tl.load(passed + 1)).to(tl.float32) * w
        if HAS_FIRST:
            moved = (behind * tl.load(passed + 2)).to(tl.float32) * m
            m = _number(passed, 3) * w + _number(passed, 4) * m
            w = kept - moved
        else:
            w = kept
        if RULE == _RMSPROP:
            v = v * _grown(present, then, _SECOND_LOGS).to(tl.float32)
    else:
        w = keep.to(tl.float32) * w
    return w, m, v


@triton.jit
def _read(at, which: tl.constexpr, offsets, is_in, IS_SPLIT: tl.constexpr):
    """Weights or state of a row, as float32."""
    if IS_SPLIT:
        upper = tl.load(at + which).to(tl.pointer_type(tl.int16))
        lower = tl.load(at + _LOWER + which).to(tl.pointer_type(tl.int16))
        high = tl.load(upper + offsets, mask=is_in, other=0).to(tl.int32)
        low = tl.load(lower + offsets, mask=is_in, other=0).to(tl.int32)
        return ((high << 16) | (low & 0xFFFF)).to(tl.float32, bitcast=True)
    else:  # noqa: RET505 - what is compiled must end here
        whole = tl.load(at + which).to(tl.pointer_type(tl.float32))
        return tl.load(whole + offsets, mask=is_in, other=0.0)


@triton.jit
def _write(at, which: tl.constexpr, offsets, is_in, values, IS_SPLIT: tl.constexpr):
    if IS_SPLIT:
        upper = tl.load(at + which).to(tl.pointer_type(tl.int16))
        lower = tl.load(at + _LOWER + which).to(tl.pointer_type(tl.int16))
        bits = values.to(tl.int32, bitcast=True)
        tl.store(upper + offsets, (bits >> 16).to(tl.int16), mask=is_in)
        tl.store(lower + offsets, (bits & 0xFFFF).to(tl.int16), mask=is_in)
    else:
        whole = tl.load(at + which).to(tl.pointer_type(tl.float32))
        tl.store(whole + offsets, values, mask=is_in)


@triton.jit(do_not_specialize=["base", "now", "count"])
def _step_rows(
    tables, ids, known, bad, steps, missed, base, now, count,
    RULE: tl.constexpr, IS_STEPWISE: tl.constexpr, BY_IDS: tl.constexpr, TABLES: tl.constexpr,
    WIDTH: tl.constexpr, HAS_FIRST: tl.constexpr, HAS_SECOND: tl.constexpr, IS_SPLIT: tl.constexpr,
    HAS_ROWS: tl.constexpr, HAS_GRADIENTS: tl.constexpr,
):  # fmt: skip
    """One row of one of the tables."""
    place = tl.program_id(0).to(tl.int64)
    at = tables
    if TABLES > 1:
        numbers = tl.arange(0, TABLES)
        starts = tl.load(tables + numbers * _COLUMNS + _START, mask=numbers < count, other=1 << 60)
        at = tables + (tl.sum((starts <= place).to(tl.int64)) - 1) * _COLUMNS
        place = place - tl.load(at + _START)
    steps_of_rows = tl.load(at + _LAST).to(tl.pointer_type(tl.int32))
    row = place
    if BY_IDS:
        id = tl.load(ids + place).to(tl.int64)
        row = tl.minimum(tl.maximum(id, 0), tl.load(at + _LENGTH) - 1)
        tl.store(known + place, row)
        if row != id:
            tl.store(bad, 1)
        # Of programs with the same row one finds it behind.
        since = tl.atomic_max(steps_of_rows + row, now)
    else:
        if HAS_ROWS:
            row = tl.load(tl.load(at + _ROWS).to(tl.pointer_type(tl.int64)) + place)
        since = tl.load(steps_of_rows + row)
    upto_step = now
    if HAS_GRADIENTS:
        upto_step = now + 1
    if since < upto_step:
        width = tl.load(at + _WIDTH)
        columns = tl.arange(0, WIDTH)
        is_in = columns < width
        offsets = row * width + columns
        epsilon = tl.load(at + _EPSILON).to(tl.float64, bitcast=True).to(tl.float32)
        w = _read(at, 0, offsets, is_in, IS_SPLIT)
        m = tl.zeros_like(w)
        v = tl.zeros_like(w)
        if HAS_FIRST:
            m = _read(at, 1, offsets, is_in, IS_SPLIT)
        if HAS_SECOND:
            v = _read(at, 2, offsets, is_in, IS_SPLIT)
        if since < now:
            passed = missed + (since - base) * _MISSED
            is_far = now - since <= _STEPWISE
            if IS_STEPWISE:
                is_far = since < now
            if RULE == _ADAM:
                is_near = tl.load(passed + _REST) <= _NEAR * tl.load(passed + _SIZE)
                moves = tl.sum((m != 0).to(tl.int32)) > 0
                is_far = is_far | ((is_near == 0) & moves)
            if is_far:
                number = since + 1
                while number <= now:
                    step = steps + (number - base) * _STEP
                    w, m, v = _one_step(w, m, v, tl.zeros_like(w), step, epsilon, RULE, HAS_FIRST)
                    number += 1
            else:
                then = steps + (since - base) * _STEP
                present = steps + (now - base) * _STEP
                upto = steps + (tl.load(passed).to(tl.int64) - base) * _STEP
                w, m, v = _at_once(w, m, v, then, present, upto, passed, epsilon, RULE, HAS_FIRST)
        if HAS_GRADIENTS:
            gradients = tl.load(at + _GRADIENTS).to(tl.pointer_type(tl.float32))
            gradient = tl.load(gradients + place * width + columns, mask=is_in, other=0.0)
            step = steps + (now + 1 - base) * _STEP
            w, m, v = _one_step(w, m, v, gradient, step, epsilon, RULE, HAS_FIRST)
        if not BY_IDS:
            tl.store(steps_of_rows + row, upto_step)
        _write(at, 0, offsets, is_in, w, IS_SPLIT)
        if HAS_FIRST:
            _write(at, 1, offsets, is_in, m, IS_SPLIT)
        if HAS_SECOND:
            _write(at, 2, offsets, is_in, v, IS_SPLIT)


@triton.jit(do_not_specialize=["width"])
def _sum_rows(values, places, starts, out, width, PLACES: tl.constexpr, WIDTH: tl.constexpr):
    """The values of one row, so many places at a time."""
    row = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(starts + row), tl.load(starts + row + 1)
    columns = tl.arange(0, WIDTH)
    is_in = columns < width
    total = tl.zeros((WIDTH,), tl.float32)
    while begin < end:
        at = begin + tl.arange(0, PLACES)
        place = tl.load(places + at, mask=at < end, other=0)
        offsets = place[:, None] * width + columns[None, :]
        summands = tl.load(values + offsets, mask=(at < end)[:, None] & is_in[None, :], other=0.0)
        total += tl.sum(summands.to(tl.float32), axis=0)
        begin += PLACES
    tl.store(out + row * width + columns, total, mask=is_in)
