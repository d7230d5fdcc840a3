"""Memory for gradients of a model on their way to a server, and for weights on their way back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from flatout.strategies.servers.layout import Layout, numbers_of


class Route(NamedTuple):
    """The memory between a rank and a server, for an optimizer's parameters.

    Attributes:
        up: gradients of the server's share.
        down: weights of the server's share.
        up_here: the same gradients on the parameters' device; `up` itself if that is the CPU.
        down_here: the same weights on the parameters' device.
        cuts: for each parameter in the share, its number, and the slice of its values.
        ups: the gradients of these slices in `up_here`.
        downs: the weights of these slices in `down_here`.
    """

    up: torch.Tensor
    down: torch.Tensor
    up_here: torch.Tensor
    down_here: torch.Tensor
    cuts: list[tuple[int, slice]]
    ups: list[torch.Tensor]
    downs: list[torch.Tensor]

    def put(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Copy gradients, given as values of each parameter; a missing gradient counts as zero."""
        each = list(zip(self.cuts, self.ups, strict=True))
        parts = [(up, own[cut]) for (n, cut), up in each if (own := gradients[n]) is not None]
        if parts:
            torch._foreach_copy_([up for up, _ in parts], [own for _, own in parts])
        if len(parts) < len(each):
            torch._foreach_zero_([up for (n, _), up in each if gradients[n] is None])
        if self.up_here is not self.up:
            self.up.copy_(self.up_here)

    def take(self, parameters: Sequence[torch.Tensor]) -> None:
        if self.down_here is not self.down:
            self.down_here.copy_(self.down)
        torch._foreach_copy_([parameters[n][cut] for n, cut in self.cuts], self.downs)


def route_of(layout: Layout, server: int, up: torch.Tensor, down: torch.Tensor) -> Route:
    device = layout.parameters[0].device
    # Data move to and from a GPU in one piece.
    up_here, down_here = up.to(device), down.to(device)
    numbers = range(len(layout.parameters))
    cuts = [(n, cut) for n in numbers if (cut := layout.piece(n, server)).stop > cut.start]
    pieces = [layout.pieces(memory, server) for memory in (up_here, down_here)]
    ups, downs = ([own[n] for n, _ in cuts] for own in pieces)
    return Route(up, down, up_here, down_here, cuts, ups, downs)


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return a parameter's gradient as values in the parameter's memory order, and remove it."""
    gradient, parameter.grad = parameter.grad, None
    if gradient is not None and gradient.stride() != parameter.stride():
        gradient = torch.empty_like(parameter).copy_(gradient)
    return None if gradient is None else numbers_of(gradient)


def length_of(layout: Layout, server: int) -> int:
    own = layout.range(server)
    return int(own.stop - own.start)
