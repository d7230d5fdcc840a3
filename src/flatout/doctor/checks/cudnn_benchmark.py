"""Check for cuDNN algorithms chosen by heuristics, although all batches have one shape."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import at, compute_ms, is_gpu, is_worth, models
from flatout.doctor.finding import Finding
from flatout.observe import Model, Observation

_OF_ONE_SHAPE = 0.95
"""Smallest share of batches with the most frequent shape; an epoch's last batch may differ."""


@check()
def look(observation: Observation) -> Findings:
    """Report convolutions on a GPU that always get one shape, without benchmarking."""
    convolutional = [model for model in models(observation) if model.has_convolutions]
    if not is_gpu(observation) or not convolutional:
        return
    if observation.cudnn_benchmark is None:
        raise NoSignal("torch.backends.cudnn.benchmark was not observed")
    cost = compute_ms(observation, "forward", "backward")
    if observation.cudnn_benchmark or not is_worth(observation, cost):
        return
    for model in convolutional:
        if _share_of_one(model) >= _OF_ONE_SHAPE:
            yield Finding(
                kind="slow",
                what="all batches have one shape, but cuDNN chooses the convolutions' algorithms "
                "unmeasured",
                do="torch.backends.cudnn.benchmark = True",
                where=at(model.site),
                cost_ms=cost,
                parity="rounding",
                recipe={"script.cudnn_benchmark": "on"},
            )


def _share_of_one(model: Model) -> float:
    counts = [count for _, count in model.inputs]
    if not counts:
        raise NoSignal("the shapes of the batches were not observed")
    return max(counts) / max(1, sum(counts))
