"""compute.touched_rows: optimizers step only the embedding rows that a batch has used.

Tables are detected by their reads: in a few steps, all reads of candidate parameters are counted.
Parameters that are read only by lookups in each step are then excluded from the optimizer's dense
update. Before an occasional read of a whole table, as by a copy or a moving average, the table is
brought up to date.
"""

from __future__ import annotations

import sys
from typing import Any

from flatout.cures.record import leave, took
from flatout.cures.steps import ScriptSteps
from flatout.hooks import is_anything_compiled, wrap

FIELD = "compute.touched_rows"
# Minimum number of rows of a table: a dense update of fewer rows costs little.
_FEWEST_ROWS = 1000
_WATCHED = 3  # number of steps in which reads are counted


def step_rows(torch: Any, steps: ScriptSteps) -> None:
    """Hook into the steps of optimizers, and into gradient clipping before them."""
    tables: dict[int, _Tables] = {}

    def before(optimizer: Any) -> None:
        if id(optimizer) not in tables:
            for other in tables.values():
                other.leave_to(optimizer)
            tables[id(optimizer)] = _Tables(torch, optimizer)
        tables[id(optimizer)].before(steps.has_closure)

    def after() -> None:
        for table in tables.values():
            table.after()

    def clipping(original: Any) -> Any:
        def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            if any(table.rows is not None for table in tables.values()):
                for table in tables.values():
                    table.gather()
                given = [parameters] if torch.is_tensor(parameters) else parameters
                parameters = [_with_rows(parameter) for parameter in given]
            return original(parameters, *args, **kwargs)

        return clip

    steps.before.append(before)
    steps.after.append(after)
    for owner in (torch.nn.utils, sys.modules["torch.nn.utils.clip_grad"]):
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            wrap(owner, name, "cures", clipping)


def _with_rows(parameter: Any) -> Any:
    if parameter.grad is None or not parameter.grad.is_sparse:
        return parameter
    values = parameter.grad.values()
    stand_in = values.detach()
    stand_in.grad = values
    return stand_in


class _Watched:
    """Counts of reads of a parameter between the steps of its optimizer."""

    def __init__(self) -> None:
        self.is_open = False
        self.ids = 0
        self.is_read_whole = False  # True if read as a whole since the last step
        self.read_whole = 0  # number of steps with a read as a whole

    def by_rows(self, ids: Any) -> None:
        self.ids += ids.numel() if self.is_open else 0

    def whole(self) -> None:
        self.is_read_whole |= self.is_open

    def close(self) -> None:
        self.read_whole += self.is_read_whole
        self.is_open = self.is_read_whole = False


class _Tables:
    """The tables of one optimizer: detected first, then stepped by rows."""

    def __init__(self, torch: Any, optimizer: Any) -> None:
        self.rows: Any = None
        self._optimizer = optimizer
        self._steps = 0
        self._found: list[Any] = []
        self._watched: dict[Any, _Watched] = {}
        why = self._why_not(torch)
        if why:
            leave(FIELD, why)
        self._is_over = bool(why)

    def _why_not(self, torch: Any) -> str:
        from flatout.models import is_hooked, watch_table
        from flatout.optim import why_dense

        name = type(self._optimizer).__name__
        if is_anything_compiled():
            return "the script compiles its model"
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            return "ranks add up dense gradients"
        why = ""
        for group in self._optimizer.param_groups:
            large = [p for p in group["params"] if _may_be_table(torch, p)]
            if large and why_dense(self._optimizer, group):
                why = why_dense(self._optimizer, group)
                continue
            for parameter in large:
                if is_hooked(parameter):
                    why = f"a hook reads the gradient of a table of {len(parameter):,}"
                    leave(FIELD, why)
                    continue
                self._watched[parameter] = _Watched()
                watch_table(parameter, self._watched[parameter])
        return "" if self._watched else why or f"{name} has no table of {_FEWEST_ROWS:,} rows"

    def before(self, has_closure: bool) -> None:
        for watched in self._watched.values():
            watched.close()
        if self._is_over:
            return
        if has_closure:
            self._end("the optimizer steps by a closure")
        elif self.rows is not None:
            self.gather()
            self.rows.step()
        elif self._steps == _WATCHED:
            self._choose()
        self._steps += 1

    def after(self) -> None:
        for watched in self._watched.values():
            watched.is_open = True
        if self._found:
            from flatout.optim import TouchedRows

            self.rows = TouchedRows(self._optimizer, self._found)
            self.rows.attach()
            rows = sum(len(table) for table in self._found)
            took(FIELD, f"{len(self._found)} tables of {rows:,} rows, touched rows only")
            self._found = []

    def gather(self) -> None:
        if self.rows is not None and self.rows.gather():
            leave(FIELD, "the gradient of a table is dense: something reads all of it")

    def leave_to(self, optimizer: Any) -> None:
        others = {id(p) for group in optimizer.param_groups for p in group["params"]}
        own = [*self._watched, *(() if self.rows is None else self.rows.weights)]
        shared = [parameter for parameter in own if id(parameter) in others]
        if not shared:
            return
        self._end("several optimizers step a table")
        for parameter in shared:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()

    def _choose(self) -> None:
        from flatout.models import unwatch_table

        for parameter, watched in self._watched.items():
            unwatch_table(parameter)
            if watched.read_whole == _WATCHED or not watched.ids:
                continue
            if 2 * watched.ids > _WATCHED * len(parameter):
                leave(FIELD, f"a batch reads most rows of a table of {len(parameter):,}")
                continue
            self._found.append(parameter)
        self._watched = {}
        if not self._found:
            self._end("no table is read by lookups alone")

    def _end(self, why: str) -> None:
        from flatout.models import unwatch_table

        leave(FIELD, why)
        self._is_over = True
        for parameter in self._watched:
            unwatch_table(parameter)
        if self.rows is not None:
            self.rows.detach()
        self._watched, self.rows = {}, None


def _may_be_table(torch: Any, parameter: Any) -> bool:
    return (
        type(parameter) is torch.nn.Parameter
        and parameter.requires_grad
        and parameter.is_cpu
        and parameter.dtype is torch.float32
        and parameter.dim() == 2
        and len(parameter) >= _FEWEST_ROWS
        and parameter.is_contiguous()
    )
