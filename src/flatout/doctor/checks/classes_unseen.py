"""Check for classes in the validation data that the training data lacks."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import at, few, made
from flatout.doctor.finding import Finding
from flatout.observe import Observation

_SHARE, _SAMPLES = 0.1, 10
"""Minimum share and number of evaluated samples with a class that training lacks."""


@check()
def look(observation: Observation) -> Findings:
    """Report classes that only evaluated datasets have, among those that the model predicts."""
    told = _told(observation)
    for loader in observation.loaders:
        classes, samples = loader.unseen_classes or ([], 0)
        of = loader.length or samples
        if not classes or not told.issuperset(classes) or samples < max(_SAMPLES, _SHARE * of):
            continue
        many = f"class{'es' * (len(classes) > 1)} {few([*map(str, classes)])}"
        yield Finding(
            kind="danger",
            what=f"{samples:,} of the {of:,} samples that are evaluated here are of {many}, of "
            "which training has none: the data were in the order of their labels when they "
            "were split",
            do="permute the samples before they are split, as random_split or train_test_split do",
            where=at(made(loader)),
            parity="changes learning",
        )


def _told(observation: Observation) -> set[int]:
    labels = [loss for loss in observation.in_losses if loss.kind == "labels"]
    if not labels:
        raise NoSignal("no labels of classes were observed")
    return set(range(max(int(loss.detail.get("classes", 0)) for loss in labels)))
