"""Steps small parts of a server's share that are neighbors as one tensor.

An optimizer spends some time on each tensor, however small it is. Servers with as many bytes would
take unlike times where some have a few large tensors, and others many small ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn

# What a run has at most: an optimizer passes over it several times, which is cheap while it is in
# the processor's cache.
_MOST_NUMBERS = 1 << 18
# Where it changes more often which parameters have gradients, each part is stepped by itself.
_MOST_CHANGES = 8


class _Run(NamedTuple):
    """Parts that lie end to end and are stepped alike.

    Attributes:
        parts: of one parameter group.
        whole: all of them, in their memory; the part itself where it is one.
        place: where they lie in the share.
    """

    parts: list[nn.Parameter]
    whole: nn.Parameter
    place: slice


class Runs:
    """The parts of a share, as its optimizer steps them.

    Args:
        optimizer: has them in its parameter groups, in their order.
        parts: end to end in `values`; some may be empty.
        values: the weights of the share.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, parts: Sequence[nn.Parameter], values: torch.Tensor
    ) -> None:
        self._optimizer, self._values = optimizer, values
        starts = accumulate((len(part) for part in parts), initial=0)
        self._start_of = dict(zip(parts, starts, strict=False))
        self._number_of = {part: number for number, part in enumerate(parts)}
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self._runs: list[_Run] = []
        self._used: list[bool] = []
        self._changes = 0

    def step(self, used: list[bool], gradient: torch.Tensor) -> None:
        """Step the parts that have a gradient.

        Args:
            used: whether a part has one.
            gradient: of the share.
        """
        if used != self._used:
            self.split()
            self._changes += 1
            self._used = list(used)
        if not self._runs:
            self._join()
        for run in self._runs:
            run.whole.grad = gradient[run.place]
        self._optimizer.step()

    def split(self) -> None:
        """Let each part have its own state again, until the next step."""
        state = self._optimizer.state
        for run in self._runs:
            run.whole.grad = None
            if len(run.parts) > 1 and (whole := state.pop(run.whole, None)):
                for part in run.parts:
                    first = self._start_of[part] - run.place.start
                    state[part] = _slice(whole, slice(first, first + len(part)))
        self._runs.clear()
        for group, parts in zip(self._optimizer.param_groups, self._groups, strict=True):
            group["params"][:] = parts

    def _join(self) -> None:
        state, most = self._optimizer.state, self._changes <= _MOST_CHANGES
        for group, parts in zip(self._optimizer.param_groups, self._groups, strict=True):
            runs: list[list[nn.Parameter]] = []
            length = 0
            for part in parts:
                if not (len(part) and self._used[self._number_of[part]]):
                    continue
                length += len(part)
                is_short = most and length <= _MOST_NUMBERS
                if runs and is_short and self._goes_on(runs[-1][-1], part):
                    runs[-1].append(part)
                else:
                    runs.append([part])
                    length = len(part)
            joined = [self._run(run) for run in runs]
            for run in joined:
                if len(run.parts) > 1 and state.get(run.parts[0]):
                    state[run.whole] = _cat([state.pop(part) for part in run.parts])
            group["params"][:] = [run.whole for run in joined]
            self._runs += joined

    def _goes_on(self, before: nn.Parameter, part: nn.Parameter) -> bool:
        """Whether a part lies behind another one, and both were stepped as often."""
        state = self._optimizer.state
        is_next = self._start_of[part] == self._start_of[before] + len(before)
        return is_next and _scalars(state.get(before)) == _scalars(state.get(part))

    def _run(self, parts: list[nn.Parameter]) -> _Run:
        first, last = self._start_of[parts[0]], self._start_of[parts[-1]] + len(parts[-1])
        whole = parts[0] if len(parts) == 1 else nn.Parameter(self._values[first:last])
        return _Run(parts, whole, slice(first, last))


def _is_whole(value: Any) -> bool:
    """Whether of a state a number belongs to each weight."""
    return torch.is_tensor(value) and value.dim() > 0


def _scalars(state: dict[str, Any] | None) -> dict[str, Any] | None:
    """What is the same for all weights of a part; "" stands for the rest."""
    if not state:
        return None
    return {
        name: "" if _is_whole(v) else v.item() if torch.is_tensor(v) else v
        for name, v in state.items()
    }


def _cat(states: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        name: torch.cat([own[name] for own in states]) if _is_whole(value) else value
        for name, value in states[0].items()
    }


def _slice(state: dict[str, Any], piece: slice) -> dict[str, Any]:
    return {
        name: value[piece].clone() if _is_whole(value) else _copied(value)
        for name, value in state.items()
    }


def _copied(value: Any) -> Any:
    return value.clone() if torch.is_tensor(value) else value
