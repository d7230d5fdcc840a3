"""`Fsdp` for a Keras model on torch.

Within the call of a layer, its variables return whole weights. In the optimizer's step they return
this rank's parts, and at other times torch's DTensors. Statistics, seeds and states, which Keras
does not train, stay whole on each rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from flatout.errors import ModelError
from flatout.models import LayerModules, keras_optimizers, keras_values
from flatout.strategies.elementwise import check_elementwise
from flatout.strategies.fsdp.fsdp import Fsdp, ParameterPart, as_shard, state_part
from flatout.strategies.strategy import Sums


class FsdpKeras(Fsdp):
    """Shards a Keras model, its gradients and its optimizer's state over the ranks."""

    def _modules_of(self, model: Any) -> nn.Module:
        self._layers = LayerModules(model)
        return self._layers.root

    def _check_optimizers(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._keras = keras_optimizers(optimizers)
        for own in self._keras.values():
            if why := own.why_whole():
                raise ModelError(
                    f"world.strategy=fsdp lets ranks step parts of weights by themselves: {why}",
                    do="leave that out, or train with world.strategy=ddp",
                )
        for optimizer in [item for item in optimizers if item not in self._keras]:
            # The model's parameters also include statistics.
            known = {p for group in optimizer.param_groups for p in group["params"]}
            check_elementwise("world.strategy=fsdp", optimizer, known)

    def begin(self) -> None:
        """Shard the model and the states, and print the expected memory."""
        self._layers.open()
        super().begin()
        self._layers.show()

    def _step_parts(self) -> None:
        super()._step_parts()
        for optimizer in self._keras.values():
            for part in self._parts:
                optimizer.change_state(part.own, part.shard.shape, _cut(part))

    # -- around a step -----------------------------------------------------------------------

    @torch.no_grad()
    def finish(self) -> Sums:
        """Sum the losses over ranks, and let the variables return this rank's parts."""
        sums = super().finish()
        self._layers.show_instead({part.own: part.part for part in self._parts})
        return sums

    def after_step(self) -> bool:
        """Note that weights have changed, and let the variables return them."""
        self._layers.show()
        return super().after_step()

    # -- whole again -------------------------------------------------------------------------

    def weights(self, model: nn.Module, *, kept: bool) -> dict[str, torch.Tensor]:
        """Return all tensors that are saved of the model, whole. All ranks call this."""
        values = keras_values(model)
        return {name: self._gathered(value, kept=kept) for name, value in values.items()}

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Give the model whole weights in the block, to be read or changed. All ranks call this."""
        wholes = {part.own: self._gathered(part.shard, kept=True) for part in self._parts}
        self._layers.show_instead(wholes)
        yield
        with torch.no_grad():
            for part in self._parts:
                part.part.copy_(state_part(wholes[part.own], part))
        self._layers.show()

    def _owners(self, optimizer: torch.optim.Optimizer) -> dict[int, ParameterPart]:
        owners = super()._owners(optimizer)
        own = self._keras.get(optimizer)
        if own is None:
            return owners
        return {number: owners[place] for number, place in own.state_places().items()}

    def close(self, error: BaseException | None = None) -> None:
        """Restore the variables' own parameters and states, whole.

        After an error other ranks may be gone, so that nothing can be gathered: the variables then
        return shards.
        """
        parts = [] if error is not None else list(self._parts)
        super().close(error)
        self._layers.close()
        for optimizer in self._keras.values():
            for part in parts:
                optimizer.change_state(part.own, part.part.shape, self._put_together(part))

    def _put_together(self, part: ParameterPart) -> Any:
        return lambda _, value: self._gathered(as_shard(value, part), kept=True)

    # -- memory ------------------------------------------------------------------------------

    def _states_in(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        own = self._keras.get(optimizer)
        if own is None:
            return super()._states_in(optimizer)
        state = own.state_dict()["state"]
        return [state[number]["value"] for number in own.state_places()]

    def _expected_in(self, optimizer: torch.optim.Optimizer) -> int | None:
        if optimizer not in self._keras:
            return super()._expected_in(optimizer)
        # these states exist already
        return sum(value.nbytes for value in self._states_in(optimizer))


def _cut(one: ParameterPart) -> Any:
    return lambda _, value: state_part(value, one)
