"""Tensors, arrays and tables that each step concatenates as a whole, so that they grow."""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from threading import get_ident
from time import perf_counter_ns
from typing import Any

from flatout.hooks import Hook, is_anything_compiled, wrap
from flatout.observe.lanes import INPUT, OPTIMIZER
from flatout.observe.observation import Growing, Site
from flatout.observe.sites import here
from flatout.observe.watch import Watch

# Steps between which functions are hooked: _FROM and _UNTIL.
_FROM, _UNTIL = 9, 18
# _AGAIN: steps from which on findings are checked again, since a window of the last entries, such
# as losses[-100:], stops growing; _STEPS: number of steps of such a check.
_AGAIN, _STEPS = (300, 1000), 4
# _LEAST: minimum number of successive steps with growth; _EVEN: largest deviation of a step's
# growth from the mean, as a share.
_LEAST, _EVEN = 6, 0.5
_FUNCTIONS = {
    "torch": ("cat", "concat", "concatenate", "vstack", "hstack", "stack"),
    "numpy": ("concatenate", "append", "vstack", "hstack", "stack"),
    "pandas": ("concat",),
}
# Functions that read a whole list of numbers and return few numbers.
_OF_LISTS = {
    "numpy": ("mean", "average", "median", "std", "sum", "max", "min", "array", "asarray"),
    "torch": ("tensor", "as_tensor"),
}


@dataclass
class _History:
    """Results of one line, by step."""

    words: str
    is_list: bool
    bytes: int = 8
    sizes: dict[int, int] = field(default_factory=dict)
    ns: dict[int, int] = field(default_factory=dict)
    pieces: dict[int, int] = field(default_factory=dict)


class GrowingHistories:
    """Record of the sizes and times of concatenations, from some steps.

    Attributes:
        histories: results that grow by about the same amount with each step.
    """

    def __init__(self, torch: Any, watch: Watch) -> None:
        self._torch = torch
        self._watch = watch
        self._hooks: list[Hook] = []
        self._is_inside = False
        self._renew()
        watch.at(_FROM, self._open)
        watch.at(_UNTIL, self._close)
        watch.on_renewal.append(self._renew)

    def _renew(self) -> None:
        self.histories: list[Growing] = []
        self._by_line: dict[Site | None, _History] = {}
        self._end()

    def _open(self) -> None:
        if is_anything_compiled():
            return  # replaced functions would make torch.compile compile again
        for functions, of_lists in ((_FUNCTIONS, False), (_OF_LISTS, True)):
            for package, names in functions.items():
                owner = sys.modules.get(package)
                for name in names if owner is not None else ():
                    given = f"{package}.{name}", of_lists
                    self._hooks.append(wrap(owner, name, "observe", self._measured, *given))

    def _end(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _measured(self, original: Any, words: str, of_lists: bool) -> Any:
        lanes = self._watch.lanes

        def put_together(*args: Any, **kwargs: Any) -> Any:
            is_ours = get_ident() == lanes.thread and not self._is_inside
            if of_lists:
                is_ours = is_ours and bool(args) and isinstance(args[0], (list, deque))
            # A deque with maxlen stops growing.
            if any(isinstance(item, deque) and item.maxlen is not None for item in args):
                is_ours = False
            if not is_ours or lanes.current in (INPUT, OPTIMIZER):
                return original(*args, **kwargs)
            self._is_inside = True
            began = perf_counter_ns()
            try:
                result = original(*args, **kwargs)
            finally:
                self._is_inside = False
            took = perf_counter_ns() - began
            history = self._by_line.setdefault(here(1), _History(words, of_lists))
            history.bytes = 8 if of_lists else int(getattr(result, "itemsize", 8))
            # Only the first call of a step counts: growth within a step begins again in the next
            # step.
            size = max(_numbers(result), len(args[0]) if of_lists else 0)
            history.sizes.setdefault(lanes.steps, size)
            if args and isinstance(args[0], (list, tuple, deque)):
                history.pieces.setdefault(lanes.steps, len(args[0]))
            history.ns[lanes.steps] = history.ns.get(lanes.steps, 0) + took
            return result

        return put_together

    def _close(self) -> None:
        self._end()
        for site, value in self._by_line.items():
            sizes = list(value.sizes.values())
            apart = [after - before for before, after in pairwise(sizes)]
            if site is None or len(apart) < _LEAST - 1 or len(apart) < (_UNTIL - _FROM) // 2:
                continue
            mean = sum(apart) / len(apart)
            if mean > 0 and all(abs(item - mean) <= _EVEN * mean for item in apart):
                last = sorted(value.ns.values())[len(value.ns) // 2]
                grown = Growing(
                    words=value.words,
                    site=site,
                    numbers=sizes[-1],
                    more=round(mean),
                    ms=last / 1e6,
                    at=max(value.sizes),
                    bytes=value.bytes,
                    is_list=value.is_list,
                    pieces=_more_pieces(value),
                )
                self.histories.append(grown)
        self._by_line.clear()
        for step in _AGAIN if self.histories else ():
            self._watch.at(step, self._open, is_once=True)
            self._watch.at(step + _STEPS, self._close_again, is_once=True)

    def _close_again(self) -> None:
        self._end()
        sizes = {site: list(value.sizes.values()) for site, value in self._by_line.items()}
        ended = [site for site, of in sizes.items() if len(of) > 2 and len({*of}) == 1]
        self.histories = [item for item in self.histories if item.site not in ended]
        self._by_line.clear()


def _more_pieces(history: _History) -> int:
    counts = list(history.pieces.values())
    if history.is_list or len(counts) < 2:
        return 0
    return max(0, round((counts[-1] - counts[0]) / (len(counts) - 1)))


def _numbers(result: Any) -> int:
    size: Any = getattr(result, "numel", None) or getattr(result, "size", 0)
    return int(size() if callable(size) else size)
