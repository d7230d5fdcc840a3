"""Buffers that a module computes from one rank's part of a batch: all ranks take their mean.

BatchNorm of torch and of Keras computes its statistics over all ranks, so its buffers are equal on
all ranks. A running mean in a module of the user's own would differ between replicas.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from flatout.errors import ModelError
from flatout.strategies.replicas import digest_of
from flatout.world import World

_WHAT = "buffers of the model's own"


class OwnBuffers:
    """Finder of buffers that differ between ranks; it averages them after each step."""

    def __init__(self, model: nn.Module, world: World, say: Callable[[str], None]) -> None:
        self._model, self._world, self._say = model, world, say
        self._found: list[torch.Tensor] | None = None

    @torch.no_grad()
    def after_step(self, samples: float) -> None:
        """Set these buffers to the mean over the samples of all ranks. All ranks call this.

        Raises:
            ModelError: in the first step, a buffer differs between ranks and has no mean.
        """
        if self._found is None:
            self._found = self._find()
        if not self._found:
            return
        parts = [buffer.reshape(-1).double() * samples for buffer in self._found]
        count = torch.tensor([samples], dtype=torch.float64, device=parts[0].device)
        flat = torch.cat([*parts, count])
        self._world.sum(flat, _WHAT)
        means = torch.split(flat[:-1] / flat[-1], [len(part) for part in parts])
        for buffer, mean in zip(self._found, means, strict=True):
            buffer.copy_(mean.view(buffer.shape))

    def _find(self) -> list[torch.Tensor]:
        named = dict(self._model.named_buffers())
        for path, module in self._model.named_modules():
            for name in module._non_persistent_buffers_set:
                named.pop(f"{path}.{name}".lstrip("."), None)
        if not named:
            return []
        own = {name: [digest_of(buffer), [*buffer.shape]] for name, buffer in named.items()}
        each = self._world.gather(own, _WHAT)
        odd = [name for name in named if any(theirs.get(name) != own[name] for theirs in each)]
        for name in odd:
            shapes = [theirs.get(name, ["", None])[1] for theirs in each]
            path, _, last = name.rpartition(".")
            kind = type(self._model.get_submodule(path)).__name__
            if not named[name].is_floating_point() or any(one != shapes[0] for one in shapes):
                raise ModelError(
                    f"module {path or 'of the model'} ({kind}) computes its buffer {last!r} from "
                    "each rank's part of the batch, and its values have no mean over ranks",
                    do="keep floating-point numbers of one shape in it, or train on one rank",
                )
            self._say(
                f"module {path or 'of the model'} ({kind}) computes its buffer {last!r} from each "
                "rank's part of the batch: after each step it becomes the mean over all ranks"
            )
        return [named[name] for name in odd]
