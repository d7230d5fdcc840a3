"""Sending to some ranks while receiving from others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

# A tensor, and the rank of the World that it goes to or comes from.
Leg = tuple[torch.Tensor, int]


def exchange(come: Iterable[Leg], go: Iterable[Leg], channel: Any) -> None:
    """Return when everything has come and gone; what is empty is not sent.

    Both ways at once: gloo tells the sender that it is awaited on the same line on which data go,
    so what is to come is announced first, or it would wait until all has gone.
    """
    legs = [dist.P2POp(dist.irecv, tensor, rank, channel) for tensor, rank in come if len(tensor)]
    legs += [dist.P2POp(dist.isend, tensor, rank, channel) for tensor, rank in go if len(tensor)]
    for work in dist.batch_isend_irecv(legs) if legs else ():
        work.wait()
