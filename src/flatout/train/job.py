"""What fit and evaluate need of a model with its loss and metrics, whatever framework made it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

from flatout.data.batch import Batch
from flatout.say import say
from flatout.train.class_weight import ClassWeight
from flatout.train.compute import build_compute
from flatout.train.losses import Loss, Value
from flatout.train.metrics import Metric
from flatout.train.narrow import Narrow
from flatout.world import ONE, World


class Job(Protocol):
    """Forward and loss of a batch, and the metrics that they feed."""

    def compute(self, batch: Batch) -> Value:
        """The batch's loss; its outputs go to the metrics, and nothing is read from the device."""
        ...

    def results(self, world: World = ONE) -> dict[str, float]:
        """The metrics over all batches of all ranks since `reset`, by name."""
        ...

    def reset(self) -> None:
        """Forget all batches."""
        ...

    def state_dict(self) -> list[dict[str, Any]]:
        """What a checkpoint in the middle of an epoch needs of this rank: one state or more."""
        ...

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Go on from there; of another World's ranks there may be several, or none."""
        ...


class TorchJob:
    """A torch model with a loss and metrics by name.

    Args:
        model: called with the batch's inputs.
        loss: compares output and targets.
        metrics: fresh ones, for this job alone.
        unweighted: no target of the source is one that the loss ignores.
        class_weight: weights of classes, for the loss; or None.
        say: gets a line where batches of float64 are cast.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        metrics: dict[str, Metric],
        *,
        unweighted: bool,
        class_weight: ClassWeight | None = None,
        say: Callable[[str], None] = say,
    ) -> None:
        self._metrics = metrics
        self._earlier: list[dict[str, Any]] = []  # of ranks that are no more
        compute = build_compute(
            model, loss, metrics.values(), unweighted=unweighted, weigh=class_weight
        )
        narrow = Narrow(model, say)
        self.compute = lambda batch: compute(narrow.batch(batch))

    def results(self, world: World = ONE) -> dict[str, float]:
        """The metrics over all batches of all ranks since `reset`, by name."""
        if world.size == 1 and not self._earlier:
            return {name: metric.compute() for name, metric in self._metrics.items()}
        states = [state for of_rank in world.gather(self.state_dict()) for state in of_rank]
        return {
            name: metric.compute([state[name] for state in states if name in state])
            for name, metric in self._metrics.items()
        }

    def reset(self) -> None:
        """Forget all batches."""
        for metric in self._metrics.values():
            metric.reset()
        self._earlier = []

    def state_dict(self) -> list[dict[str, Any]]:
        """What a checkpoint in the middle of an epoch needs: this rank's, and what it took over."""
        own = {name: metric.state_dict() for name, metric in self._metrics.items()}
        return [own, *self._earlier]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Go on from there; a metric that is new begins with nothing."""
        for state in states[:1]:
            for name, metric in self._metrics.items():
                if name in state:
                    metric.load_state_dict(state[name])
        self._earlier = states[1:]
