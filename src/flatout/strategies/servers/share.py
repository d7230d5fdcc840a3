"""The share of an optimizer's parameters that a server holds and steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import nn

from flatout.strategies.elementwise import ELEMENTWISE
from flatout.strategies.servers.layout import Layout
from flatout.strategies.servers.runs import Runs

# Number of latest updates whose times are kept.
_TIMED = 1000
_KINDS = {kind.__name__: kind for kind in ELEMENTWISE}


class Push(NamedTuple):
    """The words that are sent with a gradient.

    Attributes:
        place: index of the optimizer among those of the job.
        clock: number of steps of the worker, including this one.
        weight: weight of the samples whose mean gradient this is.
        wants_to_stop: whether the worker asks all workers to stop.
        rates: for each parameter group the learning rate, and the momentum or first beta; NaN if it
            has none.
        used: which parameters have a gradient; empty if none has, and no gradient follows.
        part: the number of the gradient's part of an epoch; -1 if no part was claimed.
    """

    place: int
    clock: int
    weight: float
    wants_to_stop: bool
    rates: list[float]
    used: list[bool]
    part: int = -1


class Share:
    """The share of an optimizer's parameters that a server holds in CPU memory."""

    def __init__(
        self,
        kind: type[torch.optim.Optimizer],
        groups: Sequence[Mapping[str, Any]],
        lengths: Sequence[int],
        dtype: torch.dtype,
        most: int | None = None,
    ) -> None:
        self.values = torch.zeros(sum(lengths), dtype=dtype)
        self._parts = [nn.Parameter(piece) for piece in torch.split(self.values, list(lengths))]
        own = [
            # Option "capturable" needs a GPU.
            {**group, "params": [self._parts[n] for n in group["params"]]}
            | ({"capturable": False} if group.get("capturable") else {})
            for group in groups
        ]
        self._optimizer = kind(own, lr=float(groups[0]["lr"]))  # type: ignore[call-arg]
        self._runs = Runs(self._optimizer, self._parts, self.values, most)
        self.parameters = len(lengths)
        self.version = 0
        self._update_ms: deque[float] = deque(maxlen=_TIMED)
        self._seen: dict[int, int] = {}

    def take_states(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        self._runs.split()
        for number, state in states.items():
            self._optimizer.state[self._parts[number]] = dict(state)

    def states(self) -> dict[int, dict[str, Any]]:
        """Return copies of the states of its parts, by the number of the parameter."""
        self._runs.split()
        return {
            number: {k: v.clone() if torch.is_tensor(v) else v for k, v in state.items()}
            for number, part in enumerate(self._parts)
            if (state := self._optimizer.state.get(part))
        }

    def step(self, worker: int, push: Push, gradient: torch.Tensor) -> int:
        """Step with a worker's gradient, and return the age of its weights in steps."""
        stale = self.version - self._seen.get(worker, 0)
        began = perf_counter()
        self._set_rates(push.rates)
        self._runs.step(push.used, gradient)
        self._update_ms.append((perf_counter() - began) * 1e3)
        self.version += 1
        return stale

    def pieces(self, rates: Sequence[float], used: list[bool]) -> list[tuple[slice, nn.Parameter]]:
        """Begin a step at these rates, and return the pieces of `values` that it changes."""
        began = perf_counter()
        self._set_rates(rates)
        result = self._runs.pieces(used)
        self._update_ms.append((perf_counter() - began) * 1e3)
        return result

    def step_piece(self, piece: nn.Parameter, gradient: torch.Tensor) -> None:
        began = perf_counter()
        self._runs.step_piece(piece, gradient)
        self._update_ms[-1] += (perf_counter() - began) * 1e3

    def update_ms(self) -> float:
        """Return the median time of the last updates, in ms; 0 without updates."""
        return median(self._update_ms) if self._update_ms else 0.0

    def _set_rates(self, rates: Sequence[float]) -> None:
        each = iter(rates)
        for group in self._optimizer.param_groups:
            _set_rates(group, next(each), next(each))

    def is_current(self, worker: int) -> bool:
        return self._seen.get(worker, 0) == self.version

    def read(self, worker: int, into: torch.Tensor) -> None:
        into.copy_(self.values)
        self._seen[worker] = self.version


def describe(optimizer: torch.optim.Optimizer, layout: Layout, server: int) -> dict[str, Any]:
    """Return the description of an optimizer for a server, as plain data and tensors."""
    number_of = {parameter: number for number, parameter in enumerate(layout.parameters)}
    groups = [
        {**group, "params": [number_of[p] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    state = optimizer.state
    states = {number: state[p] for p, number in number_of.items() if p in state}
    return {
        "kind": type(optimizer).__name__,
        "groups": groups,
        "lengths": layout.lengths(server),
        "states": list(layout.states(server, states).items()),
    }


def share_of(described: Mapping[str, Any], dtype: torch.dtype, most: int | None = None) -> Share:
    """Return the share of a description by `describe`, with zeros for weights."""
    kind = _KINDS[described["kind"]]
    share = Share(kind, described["groups"], described["lengths"], dtype, most)
    share.take_states(dict(described["states"]))
    return share


def rates_of(group: Mapping[str, Any]) -> list[float]:
    """Return a parameter group's rate, and its momentum or first beta: schedules change these."""
    momentum = group["betas"][0] if "betas" in group else group.get("momentum", math.nan)
    return [float(group["lr"]), float(momentum)]


def _set_rates(group: dict[str, Any], rate: float, momentum: float) -> None:
    group["lr"] = rate
    if "betas" in group:
        group["betas"] = (momentum, group["betas"][1])
    elif "momentum" in group:
        group["momentum"] = momentum
