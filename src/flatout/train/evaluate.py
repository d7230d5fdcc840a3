"""Loss and metrics over a source, without changing the model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from flatout.data import Batch, Source
from flatout.errors import DataError, FlatoutError, ModelError
from flatout.models import TorchModel, is_batch_coupled, uncompiled
from flatout.recipe import Parity
from flatout.train import guard
from flatout.train.checks import explained
from flatout.train.job import Job, TorchJob
from flatout.train.loop import Loop
from flatout.train.losses.confusion import Matrix
from flatout.train.ranks import agreed, part_of
from flatout.train.running_mean import RunningMean, mean_of
from flatout.train.snapshot import untouched
from flatout.train.tables.tables import explain_ids, ids_checked, ids_checked_in_evaluation

# A function that returns the batches of its first argument, and may act between two batches. Its
# second argument is a function that reads the figures after the latest batch.
Watched = Callable[[Iterator[Batch], Callable[[], Any]], Iterator[Batch]]
# Number of a validation's batches that are checked before a fit.
_BATCHES = 2
# Seconds from which on the time of this check is reported.
_TOLD_FROM_S = 5.0


class Evaluated(Protocol):
    """The interface of an Objective that an evaluation uses; described there."""

    adapter: TorchModel
    model: Any
    confusion: Matrix | None

    @property
    def tests_as_written(self) -> bool:
        """Whether an evaluation calls a step that the model's class overrides."""

    def job(self, loop: Loop, source: Source | None, *, training: bool) -> Job:
        """Return forward, loss and fresh metrics."""

    def output(self, inputs: Any, loop: Loop) -> Any:
        """Return the model's outputs for inputs."""


def evaluate(
    objective: Evaluated,
    loop: Loop,
    source: Source,
    stopped: Callable[[], bool] = lambda: False,
    watched: Watched = lambda batches, read: batches,
) -> dict[str, float] | None:
    """Return mean loss and metrics over every sample of `source`, each counted once.

    If memory runs out, batches are split. If that is measured faster and changes rounding only,
    batches of another size are used. The evaluation runs at the precision that training resolved
    to. A (sum, weight) loss is summed over all batches before the division, so the size of the
    batches does not matter.
    """
    loop.meet_others()
    guard.check_state(objective.model, "evaluation")
    loop.be_ready(objective.model)
    world = loop.world
    source = agreed(source, world)
    job = objective.job(loop, source, training=False)
    whole = loop.takes_whole_batches
    part = part_of(source, world, loop.say, whole=whole)
    mean = RunningMean()

    def read() -> dict[str, float]:
        loss = mean_of(world.gather(mean.state_dict(), "loss of an evaluation"))
        return {"loss": loss, **job.results(world)}

    with loop.feed.evaluated(source, part) as batches:
        made = watched(batches, read)
        completed = evaluate_batches(objective, loop, job, made, stopped, source, mean)
    loop.tell_skipped(source)
    if not completed:
        return None
    logs = read()
    objective.confusion = job.confusion if isinstance(job, TorchJob) else None
    return logs


def evaluate_batches(
    objective: Evaluated,
    loop: Loop,
    job: Job,
    batches: Iterable[Batch],
    stopped: Callable[[], bool] = lambda: False,
    source: Source | None = None,
    mean: RunningMean | None = None,
) -> bool:
    """Add this rank's losses to `mean`, its metrics to `job`; return False if stopped early."""
    mean = RunningMean() if mean is None else mean
    # Losses of Keras may communicate in each batch, and so do sharded weights.
    meets = objective.adapter.meets_in_loss or loop.meets_in_compute
    whole = loop.world.size > 1 and meets
    checked = ids_checked_in_evaluation(objective.model, source)

    def take(batch: Batch) -> None:
        with checked(batch):
            value = job.compute(batch)
        if batch.is_copy:
            pass  # another rank counts this batch
        elif isinstance(value, tuple):
            total, weight = value
            # If no sample is counted, nothing is added.
            safe = torch.as_tensor(weight, dtype=total.dtype).clamp_min(1e-12)
            mean.add(total / safe, weight)
        else:
            mean.add(value, batch.size)

    def output(batch: Batch) -> object:
        return objective.output(batch.inputs, loop)

    graph = as_one_graph(objective, loop, source)
    with evaluating(objective.model), loop.autocast(), graph:
        if isinstance(job, TorchJob) and job.is_of_samples:
            batches = at_the_fastest_size(objective, loop, source, batches)
        for batch in batches:
            batch = loop.ready(batch)
            with explained(objective.model, batch):
                try:
                    loop.evaluation.in_pieces(take, batch, whole=whole)
                except (IndexError, RuntimeError) as error:
                    explain_ids(error, objective.model, [batch], output, source)
                    raise
            if stopped():
                return False
    return True


def at_the_fastest_size(
    objective: Evaluated, loop: Loop, source: Source | None, batches: Iterable[Batch]
) -> Iterable[Batch]:
    """Return the same samples in the same order, in batches of another size if that is faster.

    Call it within `evaluating`. The batches stay unchanged where another size would change the
    result beyond rounding, or where `allow` requires identical bits. They also stay unchanged on
    several ranks, and if the source is not seekable.
    """
    model = objective.model
    ours = source is not None and source.seekable and loop.world.size == 1
    if not ours or loop.asked.allow is Parity.EXACT or is_batch_coupled(model):
        return batches

    def run(batch: Batch) -> object:
        with untouched(model):
            return objective.output(loop.ready(batch).inputs, loop)

    return loop.evaluation.batch_size.over(batches, run)


def as_one_graph(
    objective: Evaluated, loop: Loop, source: Source | None
) -> AbstractContextManager[None]:
    """Run the model's forward in this context as one compiled graph where that is faster.

    Nothing changes if `allow` requires identical bits or `compute.capture` is off. The same holds
    on several ranks or a GPU, and for a model that is compiled or is not torch's.
    """
    model, asked = objective.model, loop.asked.recipe.compute.capture
    if source is None or asked == "off" or loop.asked.allow is Parity.EXACT:
        return nullcontext()
    if type(objective.adapter) is not TorchModel or model._compiled_call_impl is not None:
        return nullcontext()
    if loop.world.size > 1 or loop.device.type != "cpu":
        return nullcontext()
    graph = loop.evaluation.graph
    graph.is_asked, graph.may_lend = asked == "on", loop.asked.recipe.process.threads == "auto"
    return graph.over(model, source.samples)


def look_at_validation(
    objective: Evaluated, loop: Loop, source: Source, most: int
) -> list[str] | None:
    """Evaluate some samples of a validation's first batches, and undo all effects."""
    if objective.tests_as_written:
        return None
    began = time.perf_counter()
    world = loop.world
    job = objective.job(loop, source, training=False)
    names: list[str] | None = None
    with untouched(objective.model, job):
        whole = loop.takes_whole_batches
        part = part_of(agreed(source, world), world, lambda line: None, whole=whole)
        batches = [b.first(most) if b.size > most else b for b in part.peek(_BATCHES)]
        for batch in batches:
            try:
                with ids_checked(objective.model, batch, source):
                    evaluate_batches(objective, loop, job, [batch])
            except (DataError, ModelError) as error:
                what = f"the validation data do not fit: {error.what}"
                raise type(error)(what, where=error.where, do=error.do) from error
        try:
            names = list(job.results())
        except FlatoutError:
            raise
        except Exception:  # a metric may need more samples than these
            pass
    job.reset()
    took = time.perf_counter() - began
    if took > _TOLD_FROM_S:
        loop.say(f"checked two batches of the validation data in {took:.1f} s")
    return names


def train_mode(model: nn.Module) -> None:
    """Set training mode as `model.train()` does, except for parts that the user put in evaluation.

    A module's own `train` is always called, since it may keep parts in evaluation itself, such as
    frozen BatchNorm.
    """
    if not model.training:
        model.train()
        return
    asked: set[nn.Module] = set()
    for module in model.modules():
        if module.training and module not in asked and type(module).train is not nn.Module.train:
            module.train()
            asked.update(module.modules())


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode without gradients; restore each module's mode afterwards.

    A compiled model runs uncompiled meanwhile: compiling the model once more for evaluation would
    take longer than most evaluations. It uses no_grad, because inference_mode would make tensors
    that a model or dataset keeps (a table of positions, a cached sample) unusable in training.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with uncompiled(model), torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
