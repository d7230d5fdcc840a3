"""Dropout keyed by sample for a Loop: positions of samples, and other random draws of the model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from flatout.data import Batch, map_tensors, same_state
from flatout.errors import DataError, RecipeError
from flatout.models import Layout, SampleDropout, adapter_of
from flatout.recipe import ModelFacts, Recipe
from flatout.train.losses.loss_value import Compute
from flatout.train.losses.losses import Value
from flatout.train.part import Done, Part, Step
from flatout.train.snapshot import random_state, untouched
from flatout.train.step import Stepper
from flatout.world import World


def sample_dropout(
    recipe: Recipe,
    model: nn.Module,
    seed: int,
    compute: Compute | None,
    first: list[Batch],
    facts: ModelFacts,
    world: World,
    say: Callable[[str], None],
) -> tuple[SampleDropout | None, ModelFacts]:
    """Return dropout keyed by sample if the Recipe asks for it, and the model's updated facts."""
    if recipe.compute.dropout != "by_sample":
        return None, facts
    if recipe.compute.compile == "on":
        raise RecipeError(
            "compute.dropout = by_sample has no effect in code that compute.compile = on compiles",
            do="set one of the two only",
        )
    if first and first[0].is_jagged:
        raise DataError(
            "compute.dropout = by_sample needs a sample's row in the batch, but the inputs of "
            "these batches have no row for each sample",
            do="leave compute.dropout out",
        )
    keyed = SampleDropout(model, seed)
    others: list[str] = []
    if compute is not None and first:
        batch = first[0]

        def run(count: int) -> None:
            with untouched(model, compute), torch.no_grad(), _Watch(model, others):
                compute(_some(batch, count))

        try:
            keyed.look(run)
        except BaseException:
            keyed.close()
            raise
    if compute is not None:
        # Use the result of the rank with the maximum number of samples; another rank may have no
        # samples.
        own = {site: tuple(layout) for site, layout in keyed.layouts.items()}
        size = first[0].size if first else 0
        _, layouts = max(world.gather((size, own)), key=itemgetter(0))
        keyed.layouts = {site: Layout(*layout) for site, layout in layouts.items()}
    if others:
        say(
            f"{others[0]} draws random numbers independently of the sample: they differ between "
            "ranks, and in micro-batches"
        )
    draws = facts.draws_random or keyed.has_calls
    return keyed, replace(facts, draws_random=draws, draws_by_sample=not others)


def _some(batch: Batch, count: int) -> Batch:
    numbers = torch.arange(count) % batch.size

    def chosen(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[numbers.to(tensor.device)]

    inputs, targets, weight, indices = map_tensors(chosen, batch[:4])
    return Batch(inputs, targets, weight, indices, count)


class DropoutBySample(Part):
    """Sets the positions of a step's samples, over all ranks, for each dropout layer.

    Attributes:
        keyed: draws dropout masks by position.
    """

    def __init__(self, stepper: Stepper, keyed: SampleDropout) -> None:
        self._stepper, self.keyed = stepper, keyed

    def around_step(self, step: Step, run: Callable[[Step], Done]) -> Done:
        """Make the step; its dropout depends on the number of the step.

        Raises:
            DataError: a rank does not know the positions of its samples in the global batch.
        """
        if not self._stepper.is_alone and not all(batch.whole for batch in step.batches):
            raise DataError(
                "dropout by sample needs the position of these samples in the batch of all ranks",
                do="let Flatout hand out each rank's part of a batch (no shard by files or rows); "
                "give a Batch of your own its `start` and `whole`",
            )
        with self.keyed.step(step.number):
            return run(step)

    def around_piece(self, piece: Batch, run: Callable[[Batch], Value]) -> Value:
        """Compute the loss of a micro-batch; its dropout depends on its samples' positions."""
        self.keyed.at(piece.start, piece.size)
        return run(piece)


class _Watch(ExitStack):
    """Records modules whose forward draws from a generator of the process or of a Keras layer."""

    def __init__(self, model: nn.Module, found: list[str]) -> None:
        super().__init__()
        self._found = found
        self._names = {
            module: f"{name or 'the model'} ({type(module).__name__})"
            for name, module in adapter_of(model).layers()
        }
        before: dict[nn.Module, Any] = {}

        def begin(module: nn.Module, _inputs: Any) -> None:
            before[module] = random_state()

        def end(module: nn.Module, _inputs: Any, _output: Any) -> None:
            # Hooks of the innermost module run first.
            if not found and not same_state(random_state(), before[module]):
                found.append(self._names[module])

        for module in self._names:
            self.callback(module.register_forward_pre_hook(begin).remove)
            self.callback(module.register_forward_hook(end).remove)
        self._before, self._seeds = random_state(), self._layers_own()

    def __exit__(self, *error: Any) -> Any:
        now = self._layers_own()
        drew = [name for name, seed in self._seeds.items() if not torch.equal(seed, now[name])]
        if not drew and not same_state(random_state(), self._before):
            drew = ["the loss, or code around the model,"]
        if not self._found:
            self._found.extend(drew)
        return super().__exit__(*error)

    def _layers_own(self) -> dict[str, torch.Tensor]:
        generators = {name: getattr(m, "seed_generator", None) for m, name in self._names.items()}
        return {
            name: generator.state.value.detach().clone()
            for name, generator in generators.items()
            if generator is not None
        }
