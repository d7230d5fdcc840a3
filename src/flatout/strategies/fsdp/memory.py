"""Memory of a rank for a sharded model, expected before the first step and measured after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from flatout.words import size_words

# Elements of a trial parameter, enough that tensors with a single element hardly count.
_TRIED = 1024


class Held(NamedTuple):
    """Bytes that one rank holds permanently."""

    parameters: int
    gradients: int
    states: int


def state_bytes(optimizer: torch.optim.Optimizer) -> int | None:
    """Return the bytes of an optimizer's state after a step, or None if the trial fails.

    The trial is a step on other parameters with the same options.
    """
    total = 0.0
    try:
        for group in optimizer.param_groups:
            device = group["params"][0].device  # some options hold only on that device
            parameter = nn.Parameter(torch.zeros(_TRIED, device=device))
            parameter.grad = torch.zeros(_TRIED, device=device)
            options = {**group, "params": [parameter]}
            tried = type(optimizer)([options], lr=float(group["lr"]))  # type: ignore[call-arg]
            tried.step()
            kept = [v for v in tried.state[parameter].values() if torch.is_tensor(v) and v.dim()]
            share = sum(value.nbytes for value in kept) / parameter.nbytes
            total += share * sum(p.nbytes for p in group["params"] if p.requires_grad)
    except (TypeError, ValueError, RuntimeError, IndexError):
        return None
    return round(total)


def expected_words(
    ranks: int,
    *,
    parameters: int,
    gradients: int,
    states: Sequence[int | None],
    root: int,
    blocks: Sequence[int],
    shared: int = 0,
) -> str:
    known = sum(size for size in states if size is not None)
    optimizer = f"optimizer {size_words(known)}" if None not in states else "optimizer not known"
    # While one other block is in use, the next one is gathered. In backward both have gradients.
    passing = 2 * (root + sum(sorted(blocks)[-2:]))
    return (
        f"fsdp: each of {ranks} ranks will hold {size_words(parameters + gradients + known)} = "
        f"parameters {size_words(parameters)} + gradients {size_words(gradients)} + {optimizer}; "
        f"at its peak {size_words(passing)} more of weights that are whole, in "
        f"{len(blocks) + 1} parts{_shared_words(shared)}, beside the activations"
    )


def taken_words(held: Held, rank: int, shared: int = 0) -> str:
    return (
        f"fsdp: rank {rank} holds {size_words(sum(held))} = parameters "
        f"{size_words(held.parameters)} + gradients {size_words(held.gradients)} + optimizer "
        f"{size_words(held.states)}{_shared_words(shared)}"
    )


def _shared_words(shared: int) -> str:
    return f", and {size_words(shared)} of memory that ranks share" if shared else ""
