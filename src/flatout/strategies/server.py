"""A parameter server that steps its share of the weights with each gradient that comes.

Where staleness is bounded, a worker that is too many steps ahead of the slowest waits for its
answer: stale synchronous parallel (Ho et al., "More Effective Distributed ML via a Stale
Synchronous Parallel Parameter Server", 2013).
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from threading import Condition
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import nn

from flatout.strategies.server_handing import Handing
from flatout.strategies.server_layout import Layout
from flatout.strategies.server_runs import Runs

# Of how many updates it is known how long they took.
_TIMED = 1000


class Push(NamedTuple):
    """What comes with a gradient.

    Attributes:
        place: of the optimizer among those of the job.
        clock: how many steps the worker has come to with it.
        weight: of the samples that the gradient is a mean over.
        wants_to_stop: whether the worker asks all to stop.
        rates: of each parameter group the learning rate, and the momentum or first beta; NaN where
            it has none.
        used: which parameters have a gradient; empty where none has, and none comes.
        part: the number of the part of an epoch that it is of; -1 where none was claimed.
    """

    place: int
    clock: int
    weight: float
    wants_to_stop: bool
    rates: list[float]
    used: list[bool]
    part: int = -1


class Share:
    """The share of an optimizer's parameters that a server holds in CPU memory.

    Attributes:
        values: the weights of the share, in one piece of memory.
        parameters: the number of parameters.
        version: the number of steps; steps in pieces are not counted.
    """

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
            # What "capturable" wants is for GPUs alone.
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
        """Begin with states of its parts, by the number of the parameter."""
        self._runs.split()
        for number, state in states.items():
            self._optimizer.state[self._parts[number]] = dict(state)

    def states(self) -> dict[int, dict[str, Any]]:
        """Copies of the states of its parts, by the number of the parameter."""
        self._runs.split()
        return {
            number: {k: v.clone() if torch.is_tensor(v) else v for k, v in state.items()}
            for number, part in enumerate(self._parts)
            if (state := self._optimizer.state.get(part))
        }

    def step(self, worker: int, push: Push, gradient: torch.Tensor) -> int:
        """Step with a worker's gradient; of how many steps ago its weights were."""
        stale = self.version - self._seen.get(worker, 0)
        began = perf_counter()
        self._set_rates(push.rates)
        self._runs.step(push.used, gradient)
        self._update_ms.append((perf_counter() - began) * 1e3)
        self.version += 1
        return stale

    def pieces(self, rates: Sequence[float], used: list[bool]) -> list[tuple[slice, nn.Parameter]]:
        """Begin a step at these rates: what it changes of `values`, in order."""
        began = perf_counter()
        self._set_rates(rates)
        result = self._runs.pieces(used)
        self._update_ms.append((perf_counter() - began) * 1e3)
        return result

    def step_piece(self, piece: nn.Parameter, gradient: torch.Tensor) -> None:
        """Step one of these."""
        began = perf_counter()
        self._runs.step_piece(piece, gradient)
        self._update_ms[-1] += (perf_counter() - began) * 1e3

    def update_ms(self) -> float:
        """How long an update takes, in ms: the median of the last ones, 0 where there was none."""
        return median(self._update_ms) if self._update_ms else 0.0

    def _set_rates(self, rates: Sequence[float]) -> None:
        each = iter(rates)
        for group in self._optimizer.param_groups:
            _set_rates(group, next(each), next(each))

    def is_current(self, worker: int) -> bool:
        """Whether a worker has read the weights of now."""
        return self._seen.get(worker, 0) == self.version

    def read(self, worker: int, into: torch.Tensor) -> None:
        """Copy the weights for a worker."""
        into.copy_(self.values)
        self._seen[worker] = self.version


def share_of(
    optimizer: torch.optim.Optimizer, layout: Layout, server: int, most: int | None = None
) -> Share:
    """Return the share of a server with its present optimizer state. Its weights are zeros."""
    lengths = layout.lengths(server)
    groups = groups_of(optimizer, layout)
    share = Share(type(optimizer), groups, lengths, layout.parameters[0].dtype, most)
    states = {
        n: optimizer.state[p] for n, p in enumerate(layout.parameters) if p in optimizer.state
    }
    share.take_states(layout.states(server, states))
    return share


def states_of(optimizer: torch.optim.Optimizer, layout: Layout) -> dict[int, dict[str, Any]]:
    """The states of whole parameters, by their number."""
    numbered, state = enumerate(layout.parameters), optimizer.state
    return {number: state[whole] for number, whole in numbered if whole in state}


def groups_of(optimizer: torch.optim.Optimizer, layout: Layout) -> list[dict[str, Any]]:
    """The parameter groups of an optimizer, with numbers of parameters as "params"."""
    number_of = {parameter: number for number, parameter in enumerate(layout.parameters)}
    return [
        {**group, "params": [number_of[p] for p in group["params"]]}
        for group in optimizer.param_groups
    ]


class Server:
    """Takes the workers' gradients, one after the other.

    Attributes:
        stale: of each worker, how many of its gradients were how many steps old.
        handing: of the parts of an epoch's batches.
    """

    def __init__(
        self, shares: Sequence[Share], workers: int, staleness: int | None, timeout_s: float
    ) -> None:
        self.shares = list(shares)
        self._timeout_s = timeout_s
        self._staleness = staleness
        # To which step the workers have come that are there and have steps to make.
        self._living = set(range(workers))
        self._clocks = dict.fromkeys(self._living, 0)
        self._resting: set[int] = set()
        self._meetings, self._is_over = 0, False
        self.handing = Handing(workers)
        self.stale: list[Counter[int]] = [Counter() for _ in range(workers)]
        self._changed = Condition()
        self._stop_at = 0

    @torch.no_grad()
    def push(self, worker: int, push: Push, gradient: torch.Tensor, into: torch.Tensor) -> int:
        """Step with a worker's gradient and give the weights; waits where it is too far ahead."""
        share = self.shares[push.place]
        with self._changed:
            self._clocks[worker] = push.clock
            if push.wants_to_stop and not self._stop_at:
                # Each hears of it with the answer to a step that is not behind this one.
                self._stop_at = max(self._clocks.values()) + 1
            if push.used:
                self._take(worker, push, gradient)
            self.handing.used(worker, push.part)
            self._changed.notify_all()
            self._wait_for_others(lambda: self._may_go(worker))
            share.read(worker, into)
            return self._stop_at

    def _take(self, worker: int, push: Push, gradient: torch.Tensor) -> None:
        share = self.shares[push.place]
        self.stale[worker][share.step(worker, push, gradient)] += 1

    def _wait_for_others(self, may_go: Callable[[], bool]) -> None:
        if not self._changed.wait_for(may_go, self._timeout_s):
            raise RuntimeError(f"other workers made no step in {self._timeout_s:g} s")

    def _may_go(self, worker: int) -> bool:
        bound = self._staleness
        return bound is None or self._clocks[worker] - min(self._clocks.values()) <= bound

    def begin(self, workers: Collection[int], clock: int) -> None:
        """These workers go on from this step."""
        with self._changed:
            self._living, self._is_over = set(workers), False
            self._clocks = dict.fromkeys(workers, clock)

    def leave(self, worker: int) -> None:
        """A worker has ended, or has no step left: no one waits for its steps any more."""
        with self._changed:
            self._clocks.pop(worker, None)
            self._changed.notify_all()

    def drop(self, worker: int) -> None:
        """A worker was killed, and the others go on without it; they get its parts."""
        self.handing.give_back(worker)
        with self._changed:
            self._living.discard(worker)
            self._meet_if_all_rest()

    def living(self) -> list[int]:
        """Workers that were not dropped."""
        with self._changed:
            return sorted(self._living)

    def lose(self) -> None:
        """A worker has ended, without which the others cannot go on from where they meet."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def rest(self, worker: int, patience_s: float) -> list[int]:
        """A worker has no step left: wait until that is so of all that were not dropped."""
        self.leave(worker)
        with self._changed:
            before = self._meetings
            self._resting.add(worker)
            self._meet_if_all_rest()
            self._changed.wait_for(lambda: self._meetings > before or self._is_over, patience_s)
            return self._met if self._meetings > before else []

    def _meet_if_all_rest(self) -> None:
        if self._resting >= self._living:
            self._met = sorted(self._living)
            self._resting.clear()
            self._meetings += 1
            self._changed.notify_all()

    def pull(self, worker: int, place: int, into: torch.Tensor) -> None:
        """Give a worker the weights; no one steps meanwhile."""
        with self._changed:
            self.shares[place].read(worker, into)

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Within, no one steps."""
        with self._changed:
            yield


def rates_of(group: Mapping[str, Any]) -> list[float]:
    """What schedules change of a parameter group: its rate, and its momentum or first beta."""
    momentum = group["betas"][0] if "betas" in group else group.get("momentum", math.nan)
    return [float(group["lr"]), float(momentum)]


def _set_rates(group: dict[str, Any], rate: float, momentum: float) -> None:
    group["lr"] = rate
    if "betas" in group:
        group["betas"] = (momentum, group["betas"][1])
    elif "momentum" in group:
        group["momentum"] = momentum
