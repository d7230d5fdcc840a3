"""What a loss of one's own reads: watched, or named where it may change unseen."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flatout.train.graphs.function_watch import FunctionWatch

WEIGHT, OPTIONS = 0.5, {"smooth": 0.1}


def scaled(output, target):
    return WEIGHT * F.mse_loss(output, target) + math.pi


def nested(output, target):
    return scaled(output, target) + sum(value.sum() for value in output)


def of_options(output, target):
    return F.cross_entropy(output, target, label_smoothing=OPTIONS["smooth"])


def test_a_global_number_is_watched_through_other_functions(monkeypatch):
    watch = FunctionWatch(nested)
    assert watch.holds()
    monkeypatch.setattr(f"{__name__}.WEIGHT", 0.25)
    assert not watch.holds()


def test_a_variable_of_an_outer_function_is_watched():
    def made(weight):
        def loss(output, target):
            return weight * (output - target).abs().mean()

        def change():
            nonlocal weight
            weight += 1

        return loss, change

    loss, change = made(1.0)
    watch = FunctionWatch(loss)
    assert watch.holds()
    change()
    assert not watch.holds()


def test_tensors_are_read_again_and_modules_are_told():
    weights, inner = torch.ones(3), nn.Linear(2, 2)

    def loss(output, target):
        return F.cross_entropy(inner(output), target, weights)

    watch = FunctionWatch(loss)
    weights.mul_(2)
    assert watch.holds()
    assert watch.modules == [inner]


def counts(output, target):
    global CALLS
    CALLS = 1
    return output.mean()


def shows(output, target):
    print("here")
    return output.mean()


def keeps(output, target):
    output.kept = target
    return output.mean()


class Loss:
    def __call__(self, output, target):
        return (output - target).abs().mean()


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (of_options, "it reads OPTIONS, a dict, whose changes cannot be detected"),
        (counts, "it writes to CALLS"),
        (shows, "it calls print"),
        (keeps, "it writes to kept"),
        (Loss(), "it reads itself, a Loss, whose changes cannot be detected"),
    ],
)
def test_what_may_change_unseen_is_named(loss, words):
    with pytest.raises(ValueError, match=words):
        FunctionWatch(loss)
