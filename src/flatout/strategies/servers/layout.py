"""Assignment of parameters to servers: each server has an equal share of each parameter group.

A group's parameters, end to end, are cut into ranges of equal length, one for each server. So no
server becomes slower by a large tensor, or by a group whose update takes longer. Each server has at
most one piece of a parameter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

# _SMALLEST, _LARGEST: values of a chunk. _CHUNKS: number of chunks of a share between these limits.
_SMALLEST, _LARGEST, _CHUNKS = 1 << 14, 1 << 18, 16


class Layout:
    """The parameters of an optimizer, and the pieces of each server.

    Args:
        parameters: the parameters, in the same order on every rank; each fills its memory without
            gaps.
        servers: number of servers.
        kinds: for each parameter, its kind; all values of a kind take equally long to step. None is
            one kind for all.

    Attributes:
        length: number of all values.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        servers: int,
        kinds: Sequence[Hashable] | None = None,
    ) -> None:
        self.parameters = list(parameters)
        self.length = sum(p.numel() for p in self.parameters)
        # Indexed by parameter, then by server.
        self._pieces: dict[int, list[slice]] = {}
        for numbers in self._alike(kinds or [None] * len(self.parameters)):
            self._pieces |= self._cut(numbers, servers)
        lengths = [sum(self.lengths(server)) for server in range(servers)]
        self._bounds = list(accumulate(lengths, initial=0))

    def _alike(self, kinds: Sequence[Hashable]) -> list[list[int]]:
        sizes: Counter[Hashable] = Counter()
        for kind, parameter in zip(kinds, self.parameters, strict=True):
            sizes[kind] += parameter.numel()
        result: dict[Hashable, list[int]] = {}
        for number, kind in enumerate(kinds):
            own = (kind,) if sizes[kind] >= _SMALLEST else ()
            result.setdefault(own, []).append(number)
        return list(result.values())

    def _cut(self, numbers: Sequence[int], servers: int) -> dict[int, list[slice]]:
        sizes = [self.parameters[number].numel() for number in numbers]
        *starts, length = accumulate(sizes, initial=0)
        bounds = [length * server // servers for server in range(servers + 1)]
        result: dict[int, list[slice]] = {}
        for number, start, size in zip(numbers, starts, sizes, strict=True):
            within = [min(max(bound - start, 0), size) for bound in bounds]
            result[number] = [slice(first, last) for first, last in pairwise(within)]
        return result

    def range(self, server: int) -> slice:
        return slice(self._bounds[server], self._bounds[server + 1])

    def piece(self, number: int, server: int) -> slice:
        """Return a server's slice of a parameter's values; empty if the server has none."""
        return self._pieces[number][server]

    def lengths(self, server: int) -> list[int]:
        pieces = [self.piece(number, server) for number in range(len(self.parameters))]
        return [piece.stop - piece.start for piece in pieces]

    def weights(self, server: int) -> torch.Tensor:
        each = [numbers_of(p)[self.piece(n, server)] for n, p in enumerate(self.parameters)]
        return torch.cat(each)

    def states(
        self, server: int, states: Mapping[int, Mapping[str, Any]]
    ) -> dict[int, dict[str, Any]]:
        """Return copies on the CPU of a server's part of states, by number of the parameter."""
        result: dict[int, dict[str, Any]] = {}
        for number, state in states.items():
            piece, whole = self.piece(number, server), self.parameters[number]
            if piece.stop > piece.start:
                result[number] = {
                    name: _on_cpu(part_of_state(value, whole, piece))
                    for name, value in state.items()
                }
        return result

    def pieces(self, flat: torch.Tensor, server: int) -> list[torch.Tensor]:
        """Return a server's pieces of the parameters, in memory that holds only its range."""
        result, at = [], 0
        for number in range(len(self.parameters)):
            piece = self.piece(number, server)
            size = piece.stop - piece.start
            result.append(flat[at : at + size])
            at += size
        return result


def layout_of(optimizer: torch.optim.Optimizer, servers: int) -> Layout:
    """Return the layout of an optimizer's parameters over this number of servers."""
    groups = list(enumerate(optimizer.param_groups))
    own = [(p, (place, p.requires_grad)) for place, group in groups for p in group["params"]]
    return Layout([p for p, _ in own], servers, [kind for _, kind in own])


def place_of(optimizer: torch.optim.Optimizer, optimizers: Sequence[torch.optim.Optimizer]) -> int:
    return next(place for place, item in enumerate(optimizers) if item is optimizer)


def numbers_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def is_dense(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() or any(
        tensor.dim() == dims and tensor.is_contiguous(memory_format=order)
        for dims, order in ((4, torch.channels_last), (5, torch.channels_last_3d))
    )


def part_of_state(value: Any, whole: torch.Tensor, piece: slice) -> Any:
    """Return a server's piece of a parameter's state; a value of another shape stays as it is."""
    if not torch.is_tensor(value) or not value.dim() or value.shape != whole.shape:
        return value.clone() if torch.is_tensor(value) else value
    alike = torch.empty_like(whole, dtype=value.dtype)
    alike.copy_(value)  # in the parameter's memory order
    return numbers_of(alike)[piece].clone()


def whole_state(
    whole: torch.Tensor, pieces: Sequence[tuple[slice, dict[str, Any]]]
) -> dict[str, Any]:
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


def whole_states(
    layout: Layout, by_server: Iterable[Iterable[tuple[int, dict[str, Any]]]]
) -> list[tuple[int, dict[str, Any]]]:
    """Return the whole states of parameters, by their number, joined from all servers."""
    pieces: dict[int, list[tuple[slice, dict[str, Any]]]] = {}
    for server, states in enumerate(by_server):
        for number, state in states:
            pieces.setdefault(number, []).append((layout.piece(number, server), state))
    return [(n, whole_state(layout.parameters[n], pieces[n])) for n in sorted(pieces)]


def state_beside(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, state: dict[str, Any]
) -> dict[str, Any]:
    """Return a parameter's state on the device that its optimizer needs: the parameter's device.

    Step counts stay on the CPU, except for kernels that read them on a GPU.
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
    """Return the size of the chunks in which a share travels: many, but not too small."""
    return min(_LARGEST, max(_SMALLEST, -(-length // _CHUNKS)))


def chunks_of(length: int) -> list[slice]:
    count = -(-length // chunk_of(length))
    bounds = [length * n // count for n in range(count + 1)] if count else [0]
    return [slice(start, stop) for start, stop in pairwise(bounds)]
