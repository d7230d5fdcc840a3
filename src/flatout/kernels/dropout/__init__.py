"""Dropout whose draws are a function of the sample, on any device and in any memory format.

The counter-based generator Philox 4x32-10 decides which elements are kept (Salmon, Moraes, Dror and
Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", 2011). Its counter is (block of four elements,
sample, draw, step) and its key the seed. So no mask is kept between calls: backward repeats the
draws of forward. `core.h` defines the word of each element. On other devices, and without
the C extension, torch's operators compute the same here, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from flatout.kernels import missing_extension
from flatout.kernels.openmp import parallel, team

_c = missing_extension.optional("_dropout")


_GROUP, _BLOCKS, _ROUNDS = 32, 8, 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_BUMPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
# Bytes of the dtypes that the kernel multiplies. For other dtypes it only computes the mask.
_ITEMS = {torch.bfloat16: 2, torch.float32: 4, torch.float64: 8}


class Draw(NamedTuple):
    """The values that determine the draws of one call, in addition to the element.

    Attributes:
        seed: the job's seed.
        step: number of the optimizer step.
        draw: number of this call among those of a forward.
        start: index of the first sample in the step, independent of the rank that computes it.
        samples: number of samples in the tensor.
        outer: size of the first dimension of the tensor as (outer, samples, rest): 1 if samples
            come first, the number of time steps if these come first.
    """

    seed: int
    step: int
    draw: int
    start: int
    samples: int
    outer: int = 1


def dropout(x: torch.Tensor, p: float, draw: Draw, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return `x / (1 - p)` for kept elements, and `x * 0` for the others."""
    scale = 1 / (1 - p) if p < 1 else 0.0
    if not _takes_kernel(x) or x.dtype not in _ITEMS:
        kept = keep(x.shape, p, draw, x.device)
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        result = (wide * (kept.to(wide.dtype) * scale)).to(x.dtype)
        return result if out is None else out.copy_(result)
    images = _channels_last(x) and draw.outer == 1
    dense = x if images else x.contiguous()
    result = torch.empty_like(dense) if out is None or dense is not x else out
    inner = _rest(x.shape, draw)
    channels, spatial = (x.shape[1], math.prod(x.shape[2:])) if images else (0, 0)
    _run(dense, result, _ITEMS[x.dtype], inner, channels, spatial, p, scale, draw)
    return result if out is None or result is out else out.copy_(result)


def keep(shape: Sequence[int], p: float, draw: Draw, device: torch.device) -> torch.Tensor:
    """Return a mask of the kept elements of a tensor of this shape: bool, contiguous."""
    if device.type != "cpu" or not _threads_are_there():
        return _keep_by_torch(shape, p, draw, device)
    kept = torch.empty(tuple(shape), dtype=torch.bool)
    inner = _rest(shape, draw)
    _run(kept, kept, 1, inner, 0, 0, p, 1.0, draw)
    return kept


def _rest(shape: Sequence[int], draw: Draw) -> int:
    return math.prod(shape) // (draw.outer * draw.samples)


def _threshold(p: float) -> int:
    return min(round(p * 2**32), _WORD)


# -- the kernel ------------------------------------------------------------------------------------


def _takes_kernel(x: torch.Tensor) -> bool:
    return x.device.type == "cpu" and _threads_are_there()


def _threads_are_there() -> bool:
    return _c is not None and (torch.get_num_threads() == 1 or parallel() != 0)


def _channels_last(x: torch.Tensor) -> bool:
    if x.is_contiguous() or x.dim() not in (4, 5):
        return False
    last = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    return x.is_contiguous(memory_format=last)


def _run(
    x: torch.Tensor,
    out: torch.Tensor,
    item: int,
    inner: int,
    channels: int,
    spatial: int,
    p: float,
    scale: float,
    draw: Draw,
) -> None:
    if not x.numel():
        return
    _c.run(
        x.data_ptr(),
        out.data_ptr(),
        item,
        draw.outer,
        draw.samples,
        inner,
        channels,
        spatial,
        draw.start & _WORD,
        draw.draw & _WORD,
        draw.step & _WORD,
        draw.seed & (2**64 - 1),
        _threshold(p),
        scale,
        *team(),
        False,
    )


# -- the same by torch's operators -----------------------------------------------------------------


def _keep_by_torch(
    shape: Sequence[int], p: float, draw: Draw, device: torch.device
) -> torch.Tensor:
    rest = _rest(shape, draw)
    elements = draw.outer * rest
    groups = -(-elements // _GROUP)
    blocks = torch.arange(groups * _BLOCKS, device=device)
    samples = torch.arange(draw.start, draw.start + draw.samples, device=device) & _WORD
    words = _philox(
        [
            blocks.expand(draw.samples, -1),
            samples[:, None],
            torch.tensor(draw.draw & _WORD, device=device),
            torch.tensor(draw.step & _WORD, device=device),
        ],
        draw.seed,
    )
    kept = [(word >= _threshold(p)).view(draw.samples, groups, _BLOCKS) for word in words]
    by_sample = torch.stack(kept, 2).flatten(1)[:, :elements]
    return by_sample.reshape(draw.samples, draw.outer, rest).transpose(0, 1).reshape(tuple(shape))


def _philox(counter: list[torch.Tensor], seed: int) -> list[torch.Tensor]:
    c0, c1, c2, c3 = counter
    for number in range(_ROUNDS):
        k0 = ((seed & _WORD) + number * _BUMPS[0]) & _WORD
        k1 = ((seed >> 32 & _WORD) + number * _BUMPS[1]) & _WORD
        a, b = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = (b >> 32 & _WORD) ^ c1 ^ k0, b & _WORD
        c2, c3 = (a >> 32 & _WORD) ^ c3 ^ k1, a & _WORD
    return [c0, c1, c2, c3]
