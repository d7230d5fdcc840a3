"""Casts float64 inputs for a float32 model: numpy and Python use float64 by default."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from flatout.data import Batch, Tensors, map_tensors, named_tensors


class Narrow:
    """Casts float64 to float32 if a model holds float32 and no float64, and reports it once.

    The first inputs decide for all later inputs: a job whose data fit is not checked again.
    """

    def __init__(self, model: nn.Module, say: Callable[[str], None]) -> None:
        self._model, self._say = model, say
        self._casts: bool | None = None

    def batch(self, batch: Batch) -> Batch:
        """Return the batch with inputs and targets cast; losses take weights of any dtype."""
        if not self._wanted({"inputs": batch.inputs, "targets": batch.targets}):
            return batch
        inputs, targets = map_tensors(_narrowed, (batch.inputs, batch.targets))
        return batch._replace(inputs=inputs, targets=targets)

    def inputs(self, inputs: Tensors) -> Tensors:
        """Return inputs alone, cast if needed."""
        return map_tensors(_narrowed, inputs) if self._wanted({"inputs": inputs}) else inputs

    def _wanted(self, parts: dict[str, Any]) -> bool:
        if self._casts is None:
            wide = [
                name
                for part, tensors in parts.items()
                if tensors is not None
                for name, tensor in named_tensors(part, tensors)
                if tensor.dtype == torch.float64
            ]
            self._casts = bool(wide) and self._is_narrow()
            if self._casts:
                self._say(
                    f"{', '.join(wide)}: float64, cast to float32, which the model is; "
                    ".astype('float32') in advance halves their memory"
                )
        return self._casts

    def _is_narrow(self) -> bool:
        kinds = {parameter.dtype for parameter in self._model.parameters()}
        return torch.float32 in kinds and torch.float64 not in kinds


def _narrowed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype == torch.float64 else tensor
