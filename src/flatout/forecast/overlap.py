"""What of sending gradients is not hidden behind the backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from flatout.forecast.collectives import Floats


class Bucket(NamedTuple):
    """Gradients that are sent together.

    Attributes:
        bytes: how many.
        ready: when they are complete, as a share of the backward, 0 to 1.
    """

    bytes: float
    ready: float


def exposed(
    takes: Sequence[Floats], ready: Sequence[float], backward: Floats, hidden: Floats
) -> Floats:
    """Seconds from the end of the backward until the last bucket is there.

    One bucket is sent at a time: f_i = max(ready_i, f_(i-1)) + T(bytes_i), as
    DistributedDataParallel does it (Li et al., "PyTorch Distributed", 2020).
    """
    end = np.full_like(backward, -np.inf)
    for seconds, share in zip(takes, ready, strict=True):
        begin = -hidden * backward * (1 - share)  # 0 is the end of the backward
        end = np.maximum(begin, end) + seconds
    return np.maximum(end, 0.0)


def cut(bytes: float, most: float = 25 * 2**20) -> tuple[Bucket, ...]:
    """Buckets of equal bytes, ready one after the other, where no real ones are known."""
    if not bytes:
        return ()
    count = max(1, round(bytes / most))
    return tuple(Bucket(bytes / count, (place + 1) / count) for place in range(count))
