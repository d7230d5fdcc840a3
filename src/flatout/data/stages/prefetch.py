"""prefetch: copy batches to a device ahead."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flatout.data.execution.batch_sampler import whole_number
from flatout.data.stages.stage import P, Stage, Writable
from flatout.errors import DataError


@dataclass(frozen=True)
class Prefetch(Stage):
    """Batches are copied to a device ahead."""

    device: str
    depth: int

    def resume_words(self) -> None:
        """Return None: batches are the same without this stage."""


def prefetch(self: Writable[P], device: str, *, depth: int = 2) -> P:
    """Copy batches to a device while earlier batches are computed.

    A Trainer does this by itself if it trains on a GPU.

    Args:
        device: name of the device, as in torch.
        depth: number of batches that are copied at once; 2 is double buffering.
    """
    _check_device(device)
    return self._with(Prefetch(device, whole_number("prefetch: depth", depth, 1)))


def _check_device(device: str) -> None:
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError):
        raise DataError(
            f"prefetch: expected a device such as 'cuda' or 'cuda:1', found {device!r}"
        ) from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise DataError("prefetch: there is no CUDA device that this torch can use")
