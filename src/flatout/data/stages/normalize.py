"""normalize: convert bytes of images to float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from flatout.data.batches.normalization import Normalization
from flatout.data.stages.stage import Function, P, Stage, Writable, only
from flatout.errors import DataError


@dataclass(frozen=True)
class Normalize(Stage):
    """uint8 inputs become float32, after all other stages."""

    normalization: Normalization

    once: ClassVar[bool] = True

    def check(self, before: Sequence[Stage], behind: Sequence[Stage]) -> None:
        if function := only(behind, Function):
            raise DataError(
                f"{function.name} comes after normalize, which runs last: its function would get "
                "bytes",
                do=f"put {function.name} before normalize",
            )

    def check_convert(self) -> None:
        raise DataError(
            "convert writes images as bytes, and normalize makes float32 of them",
            do="leave it out, and write it after what reads the new files",
        )


def normalize(
    self: Writable[P], mean: float | Sequence[float] = 0.0, std: float | Sequence[float] = 1.0
) -> P:
    """Convert uint8 images to float32: scaled to 0..1, then `(x - mean) / std`.

    Normalization runs last, wherever this stage is written, so that caches hold bytes. A Trainer
    copies bytes to its device and normalizes there. A model's normalization is saved with it.
    """
    return self._with(Normalize(Normalization.of(mean, std)))
