"""Check for training on one class after another."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import at, made
from flatout.doctor.finding import Finding
from flatout.observe import InLoss, Loader, Observation

_BATCHES = 6
"""Minimum number of observed batches for a conclusion."""

_PURE = 0.75
"""Share of batches with a single class from which on the order is by class."""

_DO = "DataLoader(..., shuffle=True), or torch.randperm in each epoch"


@check()
def look(observation: Observation) -> Findings:
    """Report labels that are sorted and read in order, or batches that mostly have one class."""
    loaders = [
        loader
        for loader in observation.loaders
        if loader.in_training and loader.label_runs is not None
    ]
    labels = [loss for loss in observation.in_losses if loss.kind == "labels"]
    if not loaders and not labels:
        raise NoSignal("no labels of classes were observed")
    for loader in loaders:
        if _is_sorted(loader):
            classes, _, samples, _ = loader.label_runs or (0, 0, 0, 0)
            yield _finding(
                f"the {samples:,} samples lie sorted by their {classes} classes, and are taken in "
                "that order",
                at(made(loader)),
                "shuffle=True in fit()" if observation.framework == "keras" else _DO,
            )
            return
    for label in labels:
        if label.detail.get("lies"):
            name, classes, samples = label.detail["lies"]
            yield _finding(
                f"the {samples:,} labels{f' in {name}' * bool(name)} lie sorted by their {classes} "
                "classes, and are taken in that order",
                at(label.site),
                _DO,
            )
            return
    for label in labels:
        if _is_pure(label):
            pure, batches = label.detail["of_one"], label.detail["batches"]
            kinds = len(label.detail["alone"])
            yield _finding(
                f"{pure} of {batches} batches that were checked hold a single class of "
                f"{label.detail['classes']}, {kinds} different ones in turn",
                at(label.site),
                _DO,
            )
            return


def _is_sorted(loader: Loader) -> bool:
    classes, runs, _, second = loader.label_runs or (0, 0, 0, 0)
    is_long = second >= 2 * (loader.batch_size or 1)
    return loader.is_in_order and classes > 1 and runs == classes and is_long


def _is_pure(loss: InLoss) -> bool:
    pure, batches = loss.detail["of_one"], loss.detail["batches"]
    return batches >= _BATCHES and pure >= _PURE * batches and len(loss.detail["alone"]) > 1


def _finding(what: str, where: str, do: str) -> Finding:
    return Finding(
        kind="danger",
        what=f"{what}: each batch pulls the model to its own class, and it forgets the others",
        do=do,
        where=where,
        parity="changes learning",
    )
