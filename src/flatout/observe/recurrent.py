"""Recurrent cells called in a Python loop, although all inputs are known before the loop."""

from __future__ import annotations

from statistics import median
from time import perf_counter_ns
from typing import Any

from flatout.hooks import after_forward, before_forward, is_anything_compiled
from flatout.observe.observation import Cell, Site
from flatout.observe.sites import here
from flatout.observe.watch import Watch

# Steps between which cells are hooked: _FROM and _UNTIL.
_FROM, _UNTIL = 4, 7
# Minimum number of iterations of a loop: a shorter loop costs little.
_LEAST = 4
# Smallest share of a cell's calls that belong to loops over one tensor, for a finding.
_MOST = 0.9


class _Cell:
    """A cell, and the loops in which the cell is called."""

    def __init__(self) -> None:
        self.ns = self.calls = self.began = 0
        self.loops: list[int] = []
        self.site: Site | None = None
        self._whole: Any = None
        self._last: Any = None

    def begins(self, given: Any, states: Any) -> None:
        self.calls += 1
        whole = given.untyped_storage() if given.dim() == 2 else None
        is_part = whole is not None and whole.nbytes() >= _LEAST * given.nbytes
        place = (whole.data_ptr(), whole.nbytes()) if whole is not None and is_part else None
        if place is not None and place == self._whole and _is_same(states, self._last):
            self.loops[-1] += 1
        elif place is not None:
            self.loops.append(1)
        self._whole = place
        self.began = perf_counter_ns()

    def ends(self, result: Any) -> None:
        self.ns += perf_counter_ns() - self.began
        self._last = result


def _is_same(states: Any, last: Any) -> bool:
    if isinstance(last, tuple):
        return isinstance(states, (tuple, list)) and all(
            mine is theirs for mine, theirs in zip(states, last, strict=False)
        )
    return states is last


class Recurrent:
    """Inspection of the cells of the trained models, in a few steps."""

    def __init__(self, torch: Any, watch: Watch) -> None:
        self._torch = torch
        self._watch = watch
        self._handles: list[Any] = []
        self._renew()
        watch.at(_FROM, self._open)
        watch.at(_UNTIL, self._close)
        watch.on_renewal.append(self._renew)

    def _renew(self) -> None:
        self.cells: list[Cell] = []
        self._cells: dict[int, tuple[Any, _Cell]] = {}
        self._end()

    def _open(self) -> None:
        if is_anything_compiled():
            return
        nn = self._torch.nn
        kinds = (nn.LSTMCell, nn.GRUCell, nn.RNNCell)
        for model in self._watch.models:
            module = model.ref()
            inner = () if module is None or not model.is_stepped else module.modules()
            for item in inner:
                if isinstance(item, kinds) and id(item) not in self._cells:
                    self._cells[id(item)] = item, _Cell()
                    self._handles += [
                        before_forward(item, self._begins, with_kwargs=True),
                        after_forward(item, self._ends),
                    ]

    def _begins(self, module: Any, args: Any, kwargs: Any) -> None:
        given = [*args, *kwargs.values()]
        if self._torch.is_grad_enabled():
            cell = self._cells[id(module)][1]
            cell.site = cell.site or here(1)
            cell.begins(given[0], given[1] if len(given) > 1 else None)

    def _ends(self, module: Any, args: Any, result: Any) -> None:
        if self._torch.is_grad_enabled():
            self._cells[id(module)][1].ends(result)

    def _end(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _close(self) -> None:
        self._end()
        for module, item in self._cells.values():
            loops = [count for count in item.loops if count >= _LEAST]
            if loops and sum(loops) >= _MOST * item.calls:
                ms = item.ns / 1e6 / (_UNTIL - _FROM)
                self.cells.append(Cell(type(module).__name__, item.site, int(median(loops)), ms))
        self._cells.clear()
