"""Scaling of stored pixels, which are bytes, to a model's inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatout.data.batches.batch import Batch, map_tensors
from flatout.errors import DataError

# Largest value of a uint8 pixel.
_BRIGHTEST = 255.0
# Minimum number of dimensions of a batch of images; uint8 tensors with fewer dimensions are no
# images.
_IMAGES = 3


@dataclass(frozen=True)
class Normalization:
    """Conversion of uint8 to float32: scaled to 0..1, less a mean, divided by a standard deviation.

    The conversion is one multiplication and one addition, each rounded to float32. Scaling alone
    only multiplies.

    Attributes:
        mean: mean of each channel, or one number for all, of pixels scaled to 0..1.
        std: standard deviation of each channel, or one number for all, of pixels scaled to 0..1.
    """

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    @classmethod
    def of(cls, mean: float | Sequence[float], std: float | Sequence[float]) -> Normalization:
        """Check a user's numbers, and make a Normalization of them.

        Raises:
            DataError: the numbers make no sense, or are of pixels from 0 to 255.
        """
        result = cls(_numbers("mean", mean), _numbers("std", std))
        if len({len(result.mean), len(result.std)} - {1}) > 1:
            raise DataError(
                f"normalize: expected a mean and a std for each channel, found {len(result.mean)} "
                f"and {len(result.std)}"
            )
        if min(result.std) <= 0:
            raise DataError(f"normalize: expected a std above 0, found {min(result.std):g}")
        if max(map(abs, (*result.mean, *result.std))) > 2:
            raise DataError(
                f"normalize: expected mean and std of pixels from 0 to 1, found mean {mean} and "
                f"std {std}, which are of pixels from 0 to 255",
                do="divide both by 255",
            )
        return result

    def words(self) -> str:
        """Return a text such as "scaled to 0..1, less mean (0.485, 0.456), divided by std 0.25"."""
        if self == Normalization():
            return "scaled to 0..1"
        return f"scaled to 0..1, less mean {_words(self.mean)}, divided by std {_words(self.std)}"

    def __call__(
        self,
        images: Tensor,
        *,
        channels: int = 1,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> Tensor:
        """Return the same images as float32, on their device.

        Args:
            images: uint8 of shape (size, ...).
            channels: the dimension of the channels, where each has its own mean.
            memory_format: memory format of the result, if it has four dimensions.

        Raises:
            DataError: the numbers of channels and of means differ.
        """
        each = max(len(self.mean), len(self.std))
        if each > 1 and (images.ndim <= channels or images.shape[channels] != each):
            raise DataError(
                f"normalize: a mean and std for each of {each} channels, but the images are of "
                f"shape {tuple(images.shape[1:])}",
                do="give one number for all channels, or as many as there are",
            )
        lays_out = memory_format if images.ndim == 4 else torch.contiguous_format
        made = torch.empty(
            images.shape, dtype=torch.float32, device=images.device, memory_format=lays_out
        ).copy_(images, non_blocking=True)
        if each == 1:
            made.mul_(1 / (_BRIGHTEST * self.std[0]))
            return made if self.mean[0] == 0 else made.add_(-self.mean[0] / self.std[0])
        shape = [1] * images.ndim
        shape[channels] = each
        mean, std = (
            torch.tensor(values * (each if len(values) == 1 else 1), dtype=torch.float64)
            for values in (self.mean, self.std)
        )
        scale, shift = (1 / (_BRIGHTEST * std)).float(), (-mean / std).float()
        scale, shift = (part.view(shape).to(images.device) for part in (scale, shift))
        return made.mul_(scale).add_(shift)

    def batch(
        self, batch: Batch, memory_format: torch.memory_format = torch.contiguous_format
    ) -> Batch:
        """Return the batch with its images normalized; tensors that are no images do not change."""

        def normalize(tensor: Tensor) -> Tensor:
            return self(tensor, memory_format=memory_format) if holds_bytes(tensor) else tensor

        return batch._replace(inputs=map_tensors(normalize, batch.inputs))


def holds_bytes(tensor: Tensor) -> bool:
    """Return whether a tensor is a batch of images as stored."""
    return tensor.dtype == torch.uint8 and tensor.ndim >= _IMAGES


def _numbers(name: str, given: Any) -> tuple[float, ...]:
    values = given if isinstance(given, (tuple, list)) or hasattr(given, "__array__") else [given]
    try:
        numbers = tuple(float(value) for value in values)
    except (TypeError, ValueError):
        numbers = ()
    if not numbers or not all(map(math.isfinite, numbers)):
        raise DataError(
            f"normalize: expected {name} as a number or one each channel, found {given!r}"
        )
    return numbers


def _words(values: tuple[float, ...]) -> str:
    words = ", ".join(f"{value:g}" for value in values)
    return words if len(values) == 1 else f"({words})"
