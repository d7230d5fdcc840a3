"""Learning-rate rules: what they multiply by, when, and what they refuse."""

import math

import pytest
import torch
from torch import nn

from flatout.errors import ModelError
from flatout.optim.rates import LrRule, scaled


def test_what_the_rules_multiply_by():
    assert LrRule("linear", 256).factor(1024) == 4
    assert LrRule("linear", 256).factor(64) == 0.25
    assert LrRule("sqrt", 256).factor(1024) == 2
    assert LrRule("power", 256, exponent=0.75).factor(4096) == 8
    assert LrRule("power", 256, exponent=0.5).factor(768) == pytest.approx(math.sqrt(3), rel=1e-15)
    assert LrRule("none", 256).factor(1024) == 1
    assert [LrRule("sqrt", 64, most=1.5).factor(64 * k) for k in (1, 4, 32)] == [1, 1.5, 1.5]
    assert LrRule("linear", 256, most=3).for_batch(64, None).factor == 0.25
    for rule in ("linear", "sqrt", "none"):
        assert LrRule(rule, 96).factor(96) == 1


def test_the_warm_up_rises_by_the_same_amount_in_each_step():
    scale = LrRule("linear", 256, warm_up=2).for_batch(1280, 4)
    assert scale.warm_up_steps == 8
    assert [scale.at(step) for step in range(10)] == [1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 5]


def test_a_warm_up_in_steps_or_in_parts_of_an_epoch():
    assert LrRule("linear", 8, warm_up_steps=3).for_batch(32, None).at(2) == 3
    assert LrRule("linear", 8, warm_up=0.5).for_batch(32, 7).warm_up_steps == 4
    assert LrRule("linear", 8, warm_up=0.01).for_batch(32, 7).warm_up_steps == 1
    assert LrRule("linear", 8).for_batch(32, None).at(0) == 4


def test_a_rate_that_falls_falls_at_once():
    scale = LrRule("linear", 256, warm_up=5).for_batch(64, 10)
    assert scale.at(0) == 0.25
    assert scale.words([0.4], scheduled=False) == (
        "learning rate 0.4 -> 0.1: linear rule for batch 64 instead of 256, no warm-up, because it "
        "falls"
    )


def test_an_epoch_of_unknown_length():
    with pytest.raises(ModelError, match=r"do not say how many steps(.|\n)*warm_up_steps"):
        LrRule("linear", 256, warm_up=5).for_batch(1024, None)


WORDS = {
    "warm-up": (
        LrRule("linear", 256, warm_up=5).for_batch(1024, 78),
        "learning rate 0.1 -> 0.4: linear rule for batch 1,024 instead of 256, warm-up over 5 "
        "epochs (390 steps)",
    ),
    "steps": (
        LrRule("power", 256, warm_up_steps=1, exponent=0.5).for_batch(1024, None),
        "learning rate 0.1 -> 0.2: power 0.5 rule for batch 1,024 instead of 256, warm-up over 1 "
        "step",
    ),
    "none": (
        LrRule("none", 256).for_batch(1024, 78),
        "learning rate 0.1 as given: rule 'none' for batch 1,024 instead of 256",
    ),
    "at most": (
        LrRule("sqrt", 64, most=1.5).for_batch(256, None),
        "learning rate 0.1 -> 0.15: sqrt rule, at most 1.5 times, for batch 256 instead of 64",
    ),
    "reference": (
        LrRule("sqrt", 256, warm_up=5).for_batch(256, 78),
        "learning rate 0.1 as given: 256 is the batch it was found with",
    ),
}


@pytest.mark.parametrize(("scale", "words"), WORDS.values(), ids=WORDS)
def test_what_was_done_in_words(scale, words):
    assert scale.words([0.1], scheduled=False) == words


def test_several_rates_and_schedules_in_words():
    scale = LrRule("sqrt", 64).for_batch(256, 10)
    assert scale.words([0.1, 0.02], scheduled=False).startswith("learning rate 0.1, 0.02 -> 0.2, 0")
    assert scale.words([0.1], scheduled=True).startswith("learning rate of the schedule times 2: s")


NONSENSE = {
    "unknown rule": (("quadratic", 256), {}, "known: linear, sqrt, power, none"),
    "no batch": (("linear", 0), {}, "reference_batch is a whole number of at least 1, found 0"),
    "half a sample": (("linear", 0.5), {}, "reference_batch"),
    "a bool": (("linear", True), {}, "reference_batch"),
    "negative": (("linear", 8), {"warm_up": -1}, "warm_up is a number of epochs"),
    "not a number": (("linear", 8), {"warm_up": float("nan")}, "warm_up is a number of epochs"),
    "words": (("linear", 8), {"warm_up": "5"}, "warm_up is a number of epochs"),
    "part of a step": (("linear", 8), {"warm_up_steps": 1.5}, "warm_up_steps is a whole number"),
    "twice": (("linear", 8), {"warm_up": 1, "warm_up_steps": 5}, "both warm_up and warm_up_steps"),
    "to nowhere": (("none", 8), {"warm_up": 1}, "nothing to warm up to"),
    "no exponent": (("power", 8), {}, "an exponent belongs to rule 'power'"),
    "an exponent of sqrt": (("sqrt", 8), {"exponent": 0.5}, "an exponent belongs to rule 'power'"),
    "above one": (("power", 8), {"exponent": 1.5}, "above 0 and at most 1, found 1.5"),
    "zero": (("power", 8), {"exponent": 0}, "above 0 and at most 1, found 0"),
    "at most once": (("linear", 8), {"most": 1}, "above 1, found 1"),
    "at most nan": (("sqrt", 8), {"most": float("nan")}, "above 1, found nan"),
    "nothing to limit": (("none", 8), {"most": 2}, "nothing to limit"),
}


@pytest.mark.parametrize(("given", "options", "words"), NONSENSE.values(), ids=NONSENSE)
def test_nonsense_is_refused(given, options, words):
    with pytest.raises(ModelError, match=words):
        LrRule(*given, **options)


def optimizer():
    layers = nn.Linear(2, 2), nn.Linear(2, 2)
    groups = [{"params": layers[0].parameters(), "lr": 0.3}, {"params": layers[1].parameters()}]
    return torch.optim.SGD(groups, lr=torch.tensor(0.5))


def test_all_groups_are_multiplied_and_put_back():
    steps = optimizer()
    first, second = (group["lr"] for group in steps.param_groups)
    with scaled(steps, 3.0):
        assert steps.param_groups[0]["lr"] == 0.3 * 3.0
        assert steps.param_groups[1]["lr"].item() == 1.5
    assert steps.param_groups[0]["lr"] is first
    assert steps.param_groups[1]["lr"] is second
    assert second.item() == 0.5


def test_put_back_after_an_error_too():
    steps = optimizer()
    with pytest.raises(ZeroDivisionError), scaled(steps, 3.0):
        1 / 0  # noqa: B018
    assert steps.param_groups[0]["lr"] == 0.3
