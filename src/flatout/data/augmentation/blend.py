"""mixup and cutmix: each sample of a batch is blended with the sample before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from flatout.data.batches.batch import Batch
from flatout.errors import DataError

Kind = Literal["mixup", "cutmix"]


@dataclass(frozen=True)
class Blend:
    """Blends the samples of a batch. Draws are the same for all samples of a global batch.

    Attributes:
        kind: "mixup" (Zhang et al., 2018) blends whole samples, "cutmix" (Yun et al., 2019) copies
            a part of one image into another.
        alpha: weights of the blend are drawn from the Beta distribution (alpha, alpha).
        classes: number of classes; None if it is not known.
    """

    kind: Kind
    alpha: float
    classes: int | None

    def __call__(self, batch: Batch, rng: np.random.Generator, led: bool) -> Batch:
        """Return the samples, each blended with the sample before it.

        Args:
            batch: samples to blend.
            rng: generator of the random numbers.
            led: whether the first sample is only blended into the second, and is not returned.
        """
        inputs, targets = self._inputs(batch), self._targets(batch)
        share = float(rng.beta(self.alpha, self.alpha))
        if self.kind == "cutmix":
            made, share = _pasted(*_pair(inputs, led), share, rng)
        else:
            made = _added(*_pair(inputs, led), share)
        indices = batch.indices
        return batch._replace(
            inputs=made,
            targets=_added(*_pair(targets, led), share),
            indices=indices[1:] if led and indices is not None else indices,
            size=batch.size - led,
        )

    def _inputs(self, batch: Batch) -> Tensor:
        if batch.weight is not None:
            raise DataError(f"{self.kind}: samples have weights, which do not blend")
        inputs = batch.inputs
        least = 3 if self.kind == "cutmix" else 1
        if (
            not isinstance(inputs, Tensor)
            or inputs.dim() < least
            or not (inputs.is_floating_point() or inputs.dtype is torch.uint8)
        ):
            what = "images" if self.kind == "cutmix" else "one tensor"
            raise DataError(f"{self.kind}: expected {what} of floats or bytes, found {_of(inputs)}")
        return inputs

    def _targets(self, batch: Batch) -> Tensor:
        targets = batch.targets
        if not isinstance(targets, Tensor):
            raise DataError(f"{self.kind}: expected one tensor of targets, found {_of(targets)}")
        if targets.is_floating_point():
            return targets.float()
        if targets.numel() != len(targets):
            raise DataError(
                f"{self.kind}: expected a class number for each sample, found {_of(targets)}"
            )
        if self.classes is None:
            raise DataError(
                f"{self.kind}: how many classes there are is not known",
                do=f"pass it: {self.kind}({self.alpha:g}, classes=10)",
            )
        labels = targets.reshape(-1).long()
        bad = ((labels < 0) | (labels >= self.classes)).nonzero()
        if len(bad):
            at = int(bad[0])
            where = None if batch.indices is None else f"sample {int(batch.indices[at]):,}"
            raise DataError(
                f"{self.kind}: class {int(labels[at])} is not in 0..{self.classes - 1}", where=where
            )
        return torch.nn.functional.one_hot(labels, self.classes).float()


def _pair(values: Tensor, led: bool) -> tuple[Tensor, Tensor]:
    return (values[1:], values[:-1]) if led else (values, values.roll(1, 0))


def _added(own: Tensor, other: Tensor, share: float) -> Tensor:
    mixed = torch.lerp(other.float(), own.float(), share)
    return (mixed.round_() if own.dtype is torch.uint8 else mixed).to(own.dtype)


def _pasted(
    own: Tensor, other: Tensor, share: float, rng: np.random.Generator
) -> tuple[Tensor, float]:
    down = 1 if own.dim() == 3 or _has_channels_last(own) else 2
    height, width = own.shape[down : down + 2]
    middle = rng.integers(height), rng.integers(width)
    (top, bottom), (left, right) = (
        (max(0, int(at) - half), min(length, int(at) + half))
        for at, length in zip(middle, (height, width), strict=True)
        for half in [int(0.5 * (1 - share) ** 0.5 * length)]
    )
    part = (*[slice(None)] * down, slice(top, bottom), slice(left, right))
    made = own.clone()
    made[part] = other[part]
    return made, 1 - (bottom - top) * (right - left) / (height * width)


def _has_channels_last(images: Tensor) -> bool:
    return images.shape[3] in (1, 3, 4) and images.shape[1] not in (1, 3, 4)


def _of(value: Any) -> str:
    if not isinstance(value, Tensor):
        return "none" if value is None else f"a {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
