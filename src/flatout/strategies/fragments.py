"""Parts of a model's weights that are averaged over the ranks in turn, beside their steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from flatout.errors import ModelError
from flatout.strategies.reductions import Flat, ThreadedReduction
from flatout.strategies.strategy import Tensors
from flatout.world import PendingCollective, World

# Of the first fragment's memory, beside what else local_sgd adds up.
_NUMBER = (1 << 30) + 2


class Fragment(NamedTuple):
    """Some weights.

    Attributes:
        numbers: which.
        flat: their changes one after the other, and behind them whether this rank wants to stop.
    """

    numbers: Sequence[int]
    flat: Flat


class SentFragment(NamedTuple):
    """A fragment on its way, and its weights as this rank sent them."""

    fragment: Fragment
    weights: Tensors
    mean: PendingCollective


class Fragments:
    """Cuts weights into fragments, of which one at a time is on its way.

    Attributes:
        count: likewise.
    """

    def __init__(self, world: World, reduction: ThreadedReduction, count: int) -> None:
        self._world, self._reduction, self.count = world, reduction, count
        self._fragments: list[Fragment] = []
        self._sent: SentFragment | None = None

    def lay_out(self, weights: Tensors) -> None:
        """Cut the weights, of which none is on its way."""
        parts = cut([w.numel() if w.is_floating_point() else 0 for w in weights], self.count)
        if parts == [fragment.numbers for fragment in self._fragments]:
            return
        self._fragments = []
        for index, numbers in enumerate(parts):
            doubles = any(weights[n].dtype is torch.float64 for n in numbers)
            length = 1 + sum(weights[n].numel() for n in numbers)
            dtype = torch.float64 if doubles else torch.float32
            memory = self._reduction.memory(_NUMBER + index, length, dtype)
            self._fragments.append(Fragment(numbers, Flat(memory, _NUMBER + index)))

    @torch.no_grad()
    def send(self, number: int, weights: Tensors, anchors: Tensors, vote: float) -> None:
        """Let what has changed in a fragment be averaged."""
        fragment = self._fragments[(number - 1) % self.count]
        sent = [weights[n].detach().clone() for n in fragment.numbers]
        values = fragment.flat.values
        for n, piece, own in zip(fragment.numbers, _pieces(values, sent), sent, strict=True):
            torch.sub(own, anchors[n], out=piece.view(own.shape))
        values[-1] = vote
        values.div_(self._world.size)
        begun = self._reduction.begin(fragment.flat)
        mean = self._world.begun(begun, "mean of a fragment of the ranks' weights")
        self._sent = SentFragment(fragment, sent, mean)

    @torch.no_grad()
    def receive(self, weights: Tensors, move: Callable[[int, torch.Tensor], torch.Tensor]) -> bool:
        """Take what is on its way; returns whether a rank wanted to stop when it was sent."""
        if self._sent is None:
            return False
        (fragment, sent, mean), self._sent = self._sent, None
        self._world.until_done(mean)
        values = fragment.flat.values
        for n, piece, own in zip(fragment.numbers, _pieces(values, sent), sent, strict=True):
            weights[n].add_(move(n, piece.view(own.shape)) - own)
        return bool(values[-1] > 0)


def _pieces(values: torch.Tensor, tensors: Tensors) -> Sequence[torch.Tensor]:
    return torch.split(values[:-1], [tensor.numel() for tensor in tensors])


def cut(lengths: Sequence[int], count: int) -> list[list[int]]:
    """The numbers of weights, in order, in so many parts of about as many elements each."""
    used = [number for number, length in enumerate(lengths) if length]
    if len(used) < count:
        raise ModelError(
            f"world.fragments={count} cuts the weights into parts, and only {len(used)} train",
            do=f"set world.fragments={max(len(used), 1)} or less",
        )
    parts: list[list[int]] = [[] for _ in range(count)]
    before, part = 0, -1
    for place, number in enumerate(used):
        middle = before + lengths[number] / 2
        due = int(middle * count / sum(lengths))
        # No part is left out, and each still to come gets a weight.
        part = min(max(due, count - len(used) + place), part + 1)
        parts[part].append(number)
        before += lengths[number]
    return parts
