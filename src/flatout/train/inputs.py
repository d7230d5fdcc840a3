"""Conversion of stored images to a model's input, on the device and batch by batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flatout.data import Batch, Normalization, holds_bytes, map_tensors


@dataclass(frozen=True)
class Inputs:
    """The conversion of a batch's images before the model gets them.

    Attributes:
        pixels: normalization of bytes; None leaves bytes as they are.
        channels_last: whether the model takes (size, height, width, channels), as Keras models do.
        shapes: shapes of an image, channels first, that are converted to channels last.
    """

    pixels: Normalization | None = None
    channels_last: bool = False
    shapes: frozenset[tuple[int, ...]] = frozenset()

    def __call__(
        self, batch: Batch, memory_format: torch.memory_format = torch.contiguous_format
    ) -> Batch:
        """Return the converted batch; the same object if there is nothing to convert."""
        if self.pixels is None and not self.shapes:
            return batch
        inputs = map_tensors(lambda tensor: self._image(tensor, memory_format), batch.inputs)
        return batch._replace(inputs=inputs)

    def _image(self, tensor: Tensor, memory_format: torch.memory_format) -> Tensor:
        if self.channels_last:
            memory_format = torch.contiguous_format
            if tuple(tensor.shape[1:]) in self.shapes:
                tensor = tensor.permute(0, 2, 3, 1)
        if self.pixels is None or not holds_bytes(tensor):
            return tensor
        channels = tensor.ndim - 1 if self.channels_last else 1
        return self.pixels(tensor, channels=channels, memory_format=memory_format)
