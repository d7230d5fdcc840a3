"""Optimizers made again while the same parameters continue to train, which loses moving averages.

Reported are successive optimizers with the same options on the same data, none of which lives
longer than an epoch. The weights show that training continues: the weights at the end of an
optimizer are bitwise equal to the weights when the next optimizer was made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from statistics import median
from threading import get_ident
from typing import Any
from weakref import ref

from flatout.hooks import wrap
from flatout.observe.model_facts import local
from flatout.observe.observation import RemadeOptimizer, Site
from flatout.observe.optimizers import SeenOptimizer
from flatout.observe.replicas import number_of
from flatout.observe.sites import here
from flatout.observe.tables import Tables
from flatout.observe.watch import Watch

# _MAKES: maximum number of constructions of optimizers that are recorded; _ROWS: maximum number of
# rows (optimizers of the same parameters) kept at a time.
_MAKES, _ROWS = 256, 16
# Maximum number of tensors of a row whose weights are compared.
_TENSORS = 16
# Minimum number of repeated constructions. _ALIKE: with equal rates; _OTHER_RATE: with other rates;
# _NO_DATA: where the dataset is unknown, or an optimizer may have lived longer than an epoch.
_ALIKE, _OTHER_RATE, _NO_DATA = 2, 3, 20


@dataclass(eq=False)
class _Life:
    """One optimizer of a row.

    Attributes:
        ref: reference to the optimizer.
        rate: its learning rate.
        made: number of training steps before it was made.
        seen: counter of its steps; None before its first step.
        began: number of training steps before this optimizer's first step.
        steps: number of its own steps when the next optimizer was made.
        loader, data: loader and dataset of its first step; None where unknown.
        epochs: number of epochs that the loader had begun by that step.
        is_same_data: whether the previous optimizer had the same dataset; compared early, since
            datasets may be gone at the end.
    """

    ref: ref[Any]
    rate: object
    made: int
    seen: SeenOptimizer | None = None
    began: int = 0
    steps: int = 0
    loader: Any = None
    data: Any = None
    epochs: int = 0
    is_same_data: bool = False


@dataclass(eq=False)
class _Row:
    """Successive optimizers of one kind for the same parameters.

    Attributes:
        key: the kind, the options except the learning rate, and the parameters.
        tensors: the parameters.
        site: line that made the latest optimizer.
        memory: number of steps that the optimizers' longest moving average spans.
        lives: the recorded optimizers, from the first to the latest.
        more: number of optimizers that stepped but are not in `lives`.
        until: number of training steps before the latest optimizer was made.
        ended: the latest optimizer that has taken as many steps as its predecessor did, the number
            of training steps by then, and a hash of the weights.
        goes_on: number of times that the next optimizer was made with the weights in `ended`.
        is_other: whether an optimizer was made with other weights, or got the state of its
            predecessor.
    """

    key: tuple[Any, ...]
    tensors: list[ref[Any]]
    site: Site | None
    memory: int
    lives: list[_Life] = field(default_factory=list)
    more: int = 0
    until: int = 0
    ended: tuple[_Life, int, int] | None = None
    goes_on: int = 0
    is_other: bool = False

    def is_of(self, key: tuple[Any, ...], tensors: list[Any]) -> bool:
        return self.key == key and all(
            mine() is other for mine, other in zip(self.tensors, tensors, strict=True)
        )

    def number(self) -> int:
        alive = [item for reference in self.tensors[:_TENSORS] if (item := reference()) is not None]
        return number_of([local(item) for item in alive])


class Remade:
    """Tracker of successive optimizers of the same parameters."""

    def __init__(self, torch: Any, watch: Watch, tables: Tables) -> None:
        self._watch = watch
        self._tables = tables
        self._renew()
        wrap(torch.optim.Optimizer, "__init__", "observe", self._making)
        wrap(torch.optim.Optimizer, "load_state_dict", "observe", self._loading)
        watch.on_new_optimizer.append(self._has_stepped)
        watch.on_renewal.append(self._renew)

    def _renew(self) -> None:
        self._rows: list[_Row] = []
        self._makes = 0

    # -- events -----------------------------------------------------------------------------------

    def _making(self, original: Any) -> Any:
        def init(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            if self._makes < _MAKES and get_ident() == self._watch.lanes.thread:
                self._makes += 1
                self._watch.aside(partial(self._made, optimizer, here(1)), is_once=True)

        return init

    def _loading(self, original: Any) -> Any:
        def load_state_dict(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            for row in self._rows:
                if len(row.lives) > 1 and row.lives[-1].ref() is optimizer:
                    row.is_other = True

        return load_state_dict

    def _made(self, optimizer: Any, site: Site | None) -> None:
        memory = _memory(optimizer)
        tensors = [
            item for group in optimizer.param_groups for item in group["params"] if _trains(item)
        ]
        if not (memory and tensors):
            return
        key = (*_options(optimizer), *map(id, tensors))
        row = next((item for item in self._rows if item.is_of(key, tensors)), None)
        if row is None:
            if len(self._rows) == _ROWS:
                self._rows.pop(0)
            row = _Row(key, [*map(ref, tensors)], site, memory)
            self._rows.append(row)
        self._follows(row)
        row.site, row.until = site, self._watch.lanes.steps
        rate = optimizer.param_groups[0].get("lr")
        row.lives.append(_Life(ref(optimizer), rate, row.until))

    def _follows(self, row: _Row) -> None:
        if not row.lives:
            return
        latest, steps = row.lives[-1], self._watch.lanes.steps
        if latest.seen is None:
            row.more += steps > latest.made  # otherwise it never stepped
            row.lives.pop()
            return
        latest.steps = latest.seen.steps
        if row.ended is not None and row.ended[:2] == (latest, steps):
            is_same = row.number() == row.ended[2]
            row.goes_on += is_same
            row.is_other |= not is_same

    def _has_stepped(self) -> None:
        seen = self._watch.optimizers[-1]
        optimizer = seen.ref()
        row = next((item for item in self._rows if item.lives[-1].ref() is optimizer), None)
        if optimizer is None or row is None:
            return
        life, steps = row.lives[-1], self._watch.lanes.steps
        if len(row.lives) > 1 and _steps_before(optimizer):
            row.is_other = True
        life.seen, life.began = seen, steps
        loader = life.loader = self._watch.lanes.loader
        if loader is not None:
            life.data, life.epochs = _data_of(loader), loader.facts.epochs
        if len(row.lives) > 1:
            life.is_same_data = _is_same(life.data, row.lives[-2].data)
            took = steps - row.lives[-2].began
            self._watch.at(steps + took, partial(self._may_end, row, life), is_once=True)

    def _may_end(self, row: _Row, life: _Life) -> None:
        if row.lives[-1] is life:
            row.ended = life, self._watch.lanes.steps, row.number()

    # -- findings ---------------------------------------------------------------------------------

    def results(self) -> list[RemadeOptimizer]:
        """Return the optimizers that were made again often enough under the same conditions."""
        return [*self._results()]

    def _results(self) -> Iterator[RemadeOptimizer]:
        for row in self._rows:
            lives = [item for item in row.lives if item.seen is not None]
            latest = row.lives[-1]
            has_stepped = latest.seen is None and latest.made < self._watch.lanes.steps
            times = len(lives) - 1 + row.more + has_stepped
            if len(lives) <= _ALIKE or row.is_other or not row.goes_on:
                continue
            took = [later.began - former.began for former, later in pairwise(lives)]
            if any(item.seen is not None and item.seen.steps > item.steps for item in lives[:-1]):
                continue  # the optimizer still steps, in turn with others of these parameters
            is_alike = len({item.rate for item in lives}) == 1
            enough = max(
                _ALIKE if is_alike else _OTHER_RATE,
                0 if self._is_one_epoch(lives, took) else _NO_DATA,
            )
            if times < enough or (enough == _NO_DATA and max(took) > 1):
                continue
            each = int(median(item.steps for item in lives[:-1]))
            yield RemadeOptimizer(
                row.key[0],
                row.site,
                parameters=len(row.tensors),
                times=times,
                # The first step of an optimizer is not counted while the previous optimizer is
                # alive.
                until=max(row.until, times * each),
                each=each,
                memory=row.memory,
            )

    def _is_one_epoch(self, lives: list[_Life], took: list[int]) -> bool:
        if lives[0].loader is not None:
            return all(
                later.loader is former.loader
                and later.is_same_data
                and later.epochs - former.epochs <= 1
                for former, later in pairwise(lives)
            )
        if any(life.loader is not None for life in lives):
            return False
        tables = [item.facts for item in self._tables.results() if item.facts.in_training]
        return len(tables) == 1 and max(took) * tables[0].batch_size < (
            tables[0].length + tables[0].batch_size
        )


def _trains(tensor: Any) -> bool:
    return bool(tensor.requires_grad) and not tensor.is_meta


def _options(optimizer: Any) -> tuple[str, str]:
    kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    plain = [
        sorted((name, repr(value)) for name, value in group.items() if name not in _OWN)
        for group in optimizer.param_groups
    ]
    return kind, repr(plain)


_OWN = ("params", "lr", "initial_lr")


def _memory(optimizer: Any) -> int:
    shares = [
        value
        for group in optimizer.param_groups
        for value in (*_numbers(group.get("betas")), group.get("momentum"), group.get("alpha"))
        if isinstance(value, float) and 0 < value < 1
    ]
    return round(1 / (1 - max(shares))) if shares else 0


def _numbers(betas: Any) -> tuple[Any, ...]:
    return tuple(betas) if isinstance(betas, (tuple, list)) else ()


def _steps_before(optimizer: Any) -> bool:
    state: Any = next(iter(optimizer.state.values()), None)
    count = state.get("step") if isinstance(state, dict) else None
    return count is not None and float(count) > 1


def _data_of(loader: Any) -> Any:
    dataset = getattr(loader.ref(), "dataset", None)
    try:
        return None if dataset is None else ref(dataset)
    except TypeError:  # an object without weak references, such as a list
        return id(dataset)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, ref) and isinstance(other, ref):
        return one() is not None and one() is other()
    return one is not None and one == other
