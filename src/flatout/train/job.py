"""The interface of a model with its loss and metrics for fit and evaluate, for any framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import nn

from flatout.console import say
from flatout.data import Source
from flatout.errors import ModelError
from flatout.models import KerasJob
from flatout.train.compute import ModelCompute
from flatout.train.losses.confusion import ConfusionCount, Matrix
from flatout.train.losses.loss_value import Compute
from flatout.train.losses.losses import Loss
from flatout.train.losses.metrics import Metric, as_metrics
from flatout.train.losses.narrow import Narrow
from flatout.train.several_losses import OutputMetrics, SeveralCompute, SeveralLosses, total_of
from flatout.world import ONE, World


class TorchJob:
    """A torch model with a loss and metrics by name, or with several losses and outputs."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss | SeveralLosses,
        metrics: Any,
        *,
        unweighted: bool,
        class_weight: Any = None,
        say: Callable[[str], None] = say,
        source: Source | None = None,
    ) -> None:
        self._earlier: list[dict[str, Any]] = []  # states of ranks that no longer exist
        self._losses: SeveralLosses | None = None
        self._metrics: dict[str, Metric]
        narrow = Narrow(model, say)
        losses = loss.parts.values() if isinstance(loss, SeveralLosses) else (loss,)
        if isinstance(loss, SeveralLosses):
            self._losses = loss
            of_outputs = OutputMetrics(metrics, loss.parts)
            several = SeveralCompute(model, loss, of_outputs, class_weight or {}, narrow.batch)
            parts = {f"{name}_loss": part for name, part in several.part_losses.items()}
            self._metrics = {**parts, **of_outputs.by_name()}
            self.compute: Compute = several
        else:
            self._metrics = as_metrics(metrics)
            self.compute = ModelCompute(
                model,
                loss,
                self._metrics.values(),
                unweighted=unweighted,
                weigh=class_weight,
                source=source,
                prepare=narrow.batch,
            )
        # Whether loss and metrics are independent of the division of samples into batches.
        self.is_of_samples = all(loss.own is None for loss in losses) and all(
            metric.is_of_samples for metric in self._metrics.values()
        )

    @property
    def own_parts(self) -> list[Any]:
        """The user's own objects that are called."""
        return [self.compute]

    def results(self, world: World = ONE) -> dict[str, float]:
        """Return the metrics over all batches of all ranks since `reset`, by name.

        With several losses the result also has each loss, and their total as `loss`.
        """
        if world.size == 1 and not self._earlier and self._losses is None:
            return {name: metric.compute() for name, metric in self._metrics.items()}
        states = [state for of_rank in world.gather(self.state_dict()) for state in of_rank]
        result = {
            name: metric.compute([state[name] for state in states if name in state])
            for name, metric in self._metrics.items()
        }
        return (
            result if self._losses is None else {"loss": total_of(self._losses, states), **result}
        )

    @property
    def confusion(self) -> Matrix | None:
        """Confusion counts of the latest `results`; None without such a metric."""
        kept = (m.latest for m in self._metrics.values() if isinstance(m, ConfusionCount))
        return next(kept, None)

    def reset(self) -> None:
        """Forget all batches."""
        for metric in self._metrics.values():
            metric.reset()
        self._earlier = []

    def state_dict(self) -> list[dict[str, Any]]:
        """Return this rank's state, and states taken over, for a checkpoint within an epoch."""
        own = {name: metric.state_dict() for name, metric in self._metrics.items()}
        return [own, *self._earlier]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Restore the states; a new metric starts empty."""
        for state in states[:1]:
            for name, metric in self._metrics.items():
                if name in state:
                    metric.load_state_dict(state[name])
        self._earlier = states[1:]


def metrics_of(loss: Loss | SeveralLosses, given: Any) -> dict[str, Metric]:
    """Return fresh metrics by their names in the History, without the parts of a loss."""
    taken = ["loss", "seconds"]
    if isinstance(loss, SeveralLosses):
        result = OutputMetrics(given, loss.parts).by_name()
        taken += [f"{name}_loss" for name in loss.parts]
    else:
        result = as_metrics(given)
    for name in result:
        if name in taken:
            raise ModelError(
                f"a metric would be called {name!r}, as another figure of each epoch is",
                do="give it another name, in a mapping: metrics={'my_name': metric}",
            )
    return result


Job: TypeAlias = TorchJob | KerasJob
