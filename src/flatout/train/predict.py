"""The model's outputs for every sample, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from flatout.data.batch import map_tensors, to, to_memory_format
from flatout.data.source import Source
from flatout.train import guard
from flatout.train.compute import call
from flatout.train.evaluate import evaluating

if TYPE_CHECKING:
    from flatout.train.trainer import Trainer


def predict(trainer: Trainer, source: Source) -> Any:
    """Outputs of all batches joined along the first dimension, on the CPU, in fp32 where bf16 ran.

    Raises:
        NumbersError: if a weight or buffer is not finite.
    """
    guard.check_state(trainer.model, "prediction")
    device = trainer.ready_device()
    outputs = []
    with evaluating(trainer.model), trainer.autocast():
        for batch in source.batches(0, 0):
            batch = to(batch, device, True)
            if trainer.channels_last:
                batch = to_memory_format(batch, torch.channels_last)
            outputs.append(map_tensors(_to_host, call(trainer.model, batch.inputs)))
    return _joined(outputs)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype in (torch.bfloat16, torch.float16):
        tensor = tensor.float()
    return tensor.cpu().clone()


def _joined(parts: list[Any]) -> Any:
    first = parts[0]
    if torch.is_tensor(first):
        return torch.cat(parts)
    if isinstance(first, dict):
        return {key: _joined([part[key] for part in parts]) for key in first}
    return tuple(_joined([part[i] for part in parts]) for i in range(len(first)))
