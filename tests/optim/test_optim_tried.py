"""Users of rules, of LARS and of LAMB are told what was never tried; no one else is."""

import torch
from torch import nn

from flatout.optim import Lamb, Lars, LrRule
from flatout.optim.tried import warnings_of


def sgd(kind=torch.optim.SGD):
    return kind([nn.Parameter(torch.ones(2, 2))], lr=0.1)


def scale(rule, reference, batch, steps):
    return LrRule(rule, reference).for_batch(batch, steps)


def test_who_asked_for_nothing_is_told_nothing():
    assert warnings_of(sgd(), None, 1_000_000, 1) == []
    assert warnings_of(sgd(), scale("none", 1, 1_000_000, 1), 1_000_000, 1) == []


def test_within_what_was_tried():
    assert warnings_of(sgd(), scale("linear", 256, 8192, 156), 8192, 156) == []
    assert warnings_of(sgd(), scale("linear", 32, 256, 3), 256, 3) == []


def test_a_batch_many_times_the_reference():
    (said,) = warnings_of(sgd(), scale("sqrt", 64, 4096, 400), 4096, 400)
    assert said.startswith("the batch is 64 times the one that the learning rate was found with")


def test_a_larger_batch_than_was_tried():
    (said,) = warnings_of(sgd(), scale("linear", 1024, 16384, 400), 16384, 400)
    assert said.startswith("a batch of 16,384, tried up to 8,192 (Goyal et al. 2017")


def test_fewer_steps_an_epoch_than_were_tried():
    (said,) = warnings_of(sgd(), scale("linear", 64, 2048, 29), 2048, 29)
    assert said.startswith("29 steps an epoch, tried down to 156 (Goyal et al. 2017")


def test_the_linear_rule_for_adam():
    for kind in (torch.optim.Adam, torch.optim.NAdam, torch.optim.RMSprop, Lamb):
        said = warnings_of(sgd(kind), scale("linear", 256, 512, 400), 512, 400)
        assert f"found for SGD; for {kind.__name__} theory and experiments" in said[0]
    assert warnings_of(sgd(torch.optim.Adam), scale("sqrt", 256, 512, 400), 512, 400) == []


def test_lars_and_lamb_always_say_how_far_they_were_tried():
    for kind in (Lars, Lamb):
        (said,) = warnings_of(sgd(kind), None, 4096, 300)
        assert f"{kind.__name__} is for very large batches; it was tried up to 32,768" in said
        (said,) = warnings_of(sgd(kind), None, 65536, 20)
        assert said.startswith("a batch of 65,536, tried up to 32,768 and 20 steps an epoch, tried")
        (said,) = warnings_of(sgd(kind), None, None, None)
        assert "very large batches" in said
