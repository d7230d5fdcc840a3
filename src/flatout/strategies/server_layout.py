"""Parameters end to end, cut into ranges of equal length: one for each parameter server.

A range may begin and end within a tensor, so that no server has more than its share however large
one tensor is. Of a parameter each server has at most one piece.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

# Numbers of a chunk, and of how many chunks a small share has.
_SMALLEST, _LARGEST, _CHUNKS = 1 << 14, 1 << 18, 16


class Layout:
    """The parameters of an optimizer, and what each server has of them.

    Args:
        parameters: in the same order on every rank; each fills its memory without gaps.
        servers: how many.

    Attributes:
        starts: where each parameter begins.
        length: numbers in all.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], servers: int) -> None:
        self.parameters = list(parameters)
        ends = list(accumulate((p.numel() for p in self.parameters), initial=0))
        self.starts, self.length = ends[:-1], ends[-1]
        self._bounds = [self.length * server // servers for server in range(servers + 1)]

    def range(self, server: int) -> slice:
        """What a server has of all numbers."""
        return slice(self._bounds[server], self._bounds[server + 1])

    def piece(self, number: int, server: int) -> slice:
        """What a server has of a parameter's own numbers; empty where it has none."""
        start, size = self.starts[number], self.parameters[number].numel()
        own = self.range(server)
        first = min(max(own.start - start, 0), size)
        return slice(first, max(first, min(own.stop - start, size)))

    def lengths(self, server: int) -> list[int]:
        """How many numbers of each parameter a server has."""
        pieces = [self.piece(number, server) for number in range(len(self.parameters))]
        return [piece.stop - piece.start for piece in pieces]

    def weights(self, server: int) -> torch.Tensor:
        """What a server has of the parameters, end to end; a copy."""
        each = [numbers_of(p)[self.piece(n, server)] for n, p in enumerate(self.parameters)]
        return torch.cat(each)

    def states(
        self, server: int, states: Mapping[int, Mapping[str, Any]]
    ) -> dict[int, dict[str, Any]]:
        """What a server has of the states of parameters, by their number; copies on the CPU."""
        result: dict[int, dict[str, Any]] = {}
        for number, state in states.items():
            piece, whole = self.piece(number, server), self.parameters[number]
            if piece.stop > piece.start:
                result[number] = {
                    name: _on_cpu(part_of_state(value, whole, piece))
                    for name, value in state.items()
                }
        return result

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The parameters' places in one piece of memory, each in the parameter's memory order."""
        return [
            flat.as_strided(p.size(), p.stride(), start)
            for p, start in zip(self.parameters, self.starts, strict=True)
        ]

    def pieces(self, flat: torch.Tensor, server: int) -> list[torch.Tensor]:
        """A server's pieces of the parameters, where its range alone lies in memory."""
        result, at = [], 0
        for number in range(len(self.parameters)):
            piece = self.piece(number, server)
            size = piece.stop - piece.start
            result.append(flat[at : at + size])
            at += size
        return result


def place_of(optimizer: torch.optim.Optimizer, optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """The place of an optimizer among those of the job."""
    return next(place for place, item in enumerate(optimizers) if item is optimizer)


def numbers_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's numbers as they lie in memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its numbers fill its memory without gaps."""
    return tensor.is_contiguous() or any(
        tensor.dim() == dims and tensor.is_contiguous(memory_format=order)
        for dims, order in ((4, torch.channels_last), (5, torch.channels_last_3d))
    )


def part_of_state(value: Any, whole: torch.Tensor, piece: slice) -> Any:
    """Of a parameter's state a server's piece; what is not of its shape stays as it is."""
    if not torch.is_tensor(value) or not value.dim() or value.shape != whole.shape:
        return value.clone() if torch.is_tensor(value) else value
    alike = torch.empty_like(whole, dtype=value.dtype)
    alike.copy_(value)  # in the parameter's memory order
    return numbers_of(alike)[piece].clone()


def whole_state(
    whole: torch.Tensor, pieces: Sequence[tuple[slice, dict[str, Any]]]
) -> dict[str, Any]:
    """A parameter's state from what the servers have of it.

    Args:
        whole: the parameter.
        pieces: of each server that has some, which of its numbers, and their state.
    """
    result: dict[str, Any] = {}
    for piece, state in pieces:
        for name, value in state.items():
            if not torch.is_tensor(value) or not value.dim():
                result[name] = value
                continue
            if name not in result:
                result[name] = torch.empty_like(whole, dtype=value.dtype, device="cpu")
            numbers_of(result[name])[piece].copy_(value)
    return result


def state_beside(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, state: dict[str, Any]
) -> dict[str, Any]:
    """A parameter's state where its optimizer wants it: beside the parameter.

    Counts of steps stay on the CPU, but for kernels that read them on a GPU.
    """
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    reads_there = group.get("fused") or group.get("capturable")
    return {
        name: value.to(parameter.device)
        if torch.is_tensor(value) and (value.dim() or reads_there)
        else value
        for name, value in state.items()
    }


def _on_cpu(value: Any) -> Any:
    return value.cpu() if torch.is_tensor(value) else value


def chunk_of(length: int) -> int:
    """In chunks of how many numbers a share travels and is stepped: many, but not too small."""
    return min(_LARGEST, max(_SMALLEST, -(-length // _CHUNKS)))


def chunks_of(length: int) -> list[slice]:
    """A share, cut evenly."""
    count = -(-length // chunk_of(length))
    bounds = [length * n // count for n in range(count + 1)] if count else [0]
    return [slice(start, stop) for start, stop in pairwise(bounds)]
