"""Steps a server's share in pieces of one size, independent of its tensors.

An optimizer spends a fixed time on each tensor, however small. It passes over a large one several
times, which is slow if the tensor exceeds the processor's cache. So servers with equal bytes would
take different times if some have a few large tensors, and others many small ones. Therefore
neighboring parts are stepped as one tensor, and long ones are cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

# Maximum number of values that are stepped as one tensor.
_MOST_NUMBERS = 1 << 18
# Maximum number of changes of the set of parameters with gradients. After more, each part is
# stepped by itself.
_MOST_CHANGES = 8


class _Run(NamedTuple):
    """Neighboring parts that are stepped as one.

    Attributes:
        parts: parts of one parameter group.
        pieces: pieces of their memory, which the optimizer steps; a single part is its own piece.
        places: the slices of the pieces in the share.
    """

    parts: list[nn.Parameter]
    pieces: list[nn.Parameter]
    places: list[slice]

    @property
    def is_part(self) -> bool:
        return self.pieces[0] is self.parts[0]


class Runs:
    """The parts of a share, as its optimizer steps them."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parts: Sequence[nn.Parameter],
        values: torch.Tensor,
        most: int | None = None,
    ) -> None:
        self._optimizer, self._values = optimizer, values
        self._most = most or _MOST_NUMBERS
        starts = accumulate((len(part) for part in parts), initial=0)
        self._start_of = dict(zip(parts, starts, strict=False))
        self._number_of = {part: number for number, part in enumerate(parts)}
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self._runs: list[_Run] = []
        self._used: list[bool] = []
        self._changes = 0

    def step(self, used: list[bool], gradient: torch.Tensor) -> None:
        self._prepare(used)
        for run in self._runs:
            for piece, place in zip(run.pieces, run.places, strict=True):
                piece.grad = gradient[place]
        self._optimizer.step()

    def pieces(self, used: list[bool]) -> list[tuple[slice, nn.Parameter]]:
        self._prepare(used)
        result = [each for run in self._runs for each in zip(run.places, run.pieces, strict=True)]
        for _, piece in result:
            piece.grad = None
        return result

    def step_piece(self, piece: nn.Parameter, gradient: torch.Tensor) -> None:
        piece.grad = gradient
        self._optimizer.step()
        piece.grad = None

    def _prepare(self, used: list[bool]) -> None:
        if used != self._used:
            self.split()
            self._changes += 1
            self._used = list(used)
        if not self._runs:
            self._join()

    def split(self) -> None:
        state = self._optimizer.state
        for run in self._runs:
            for piece in run.pieces:
                piece.grad = None
            own = [] if run.is_part else [state.pop(piece, None) for piece in run.pieces]
            if not all(own) or not own:
                continue
            whole = _cat(own)
            for part in run.parts:
                first = self._start_of[part] - run.places[0].start
                state[part] = _slice(whole, slice(first, first + len(part)))
        self._runs.clear()
        for group, parts in zip(self._optimizer.param_groups, self._groups, strict=True):
            group["params"][:] = parts

    def _join(self) -> None:
        state, may_join = self._optimizer.state, self._changes <= _MOST_CHANGES
        for group, parts in zip(self._optimizer.param_groups, self._groups, strict=True):
            runs: list[list[nn.Parameter]] = []
            for part in parts:
                if not (len(part) and self._used[self._number_of[part]]):
                    continue
                if runs and may_join and self._goes_on(runs[-1][-1], part):
                    runs[-1].append(part)
                else:
                    runs.append([part])
            joined = [self._run(run, may_join) for run in runs]
            for run in joined:
                if not run.is_part and state.get(run.parts[0]):
                    whole, start = (
                        _cat([state.pop(part) for part in run.parts]),
                        run.places[0].start,
                    )
                    for piece, place in zip(run.pieces, run.places, strict=True):
                        own = slice(place.start - start, place.stop - start)
                        state[piece] = _slice(whole, own)
            group["params"][:] = [piece for run in joined for piece in run.pieces]
            self._runs += joined

    def _goes_on(self, before: nn.Parameter, part: nn.Parameter) -> bool:
        state = self._optimizer.state
        is_next = self._start_of[part] == self._start_of[before] + len(before)
        return is_next and _scalars(state.get(before)) == _scalars(state.get(part))

    def _run(self, parts: list[nn.Parameter], may_cut: bool) -> _Run:
        first, last = self._start_of[parts[0]], self._start_of[parts[-1]] + len(parts[-1])
        count = -(-(last - first) // self._most) if may_cut else 1
        bounds = [first + (last - first) * n // count for n in range(count + 1)]
        places = [slice(start, stop) for start, stop in pairwise(bounds)]
        if len(parts) == count == 1:
            return _Run(parts, parts, places)
        return _Run(parts, [nn.Parameter(self._values[place]) for place in places], places)


def _is_whole(value: Any) -> bool:
    return torch.is_tensor(value) and value.dim() > 0


def _scalars(state: dict[str, Any] | None) -> dict[str, Any] | None:
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
