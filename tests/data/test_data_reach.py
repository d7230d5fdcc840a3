"""What a user's code works with, by its attributes, variables and names."""

import functools
import random
import sqlite3
import threading
from random import choice

import numpy as np
import pytest
import torch
from torch import nn

from flatout.data.digests.reach import bound_to_training, own_generator, shared_by_fork

MODEL = nn.Linear(2, 2)
RNG = np.random.default_rng(0)


class Holding:
    def __init__(self, **held):
        self.__dict__.update(held)


class ByName:
    def __getitem__(self, index):
        return MODEL(torch.ones(2)), RNG.random()


def by_closure(held):
    def make():
        return held

    return make


def generator_of(held):
    yield 0
    yield held


def started(held):
    made = generator_of(held)
    next(made)
    return made


def by_default(held):
    def make(value=held):
        return value

    return make


def through(held):
    return [
        Holding(a=held),
        Holding(a=[{"b": (held,)}]),
        by_closure(held),
        started(held),
        by_default(held),
        functools.partial(print, held),
        Holding(a=Holding(b=Holding(c=held))).__dict__,
        Holding(method=by_closure(by_closure(held))),
    ]


@pytest.mark.parametrize("held", [MODEL, torch.optim.SGD(MODEL.parameters(), 0.1)])
def test_models_and_optimizers_are_found(held):
    for thing in through(held):
        assert type(held).__name__ in bound_to_training(thing)


def test_what_belongs_to_a_thread_is_found():
    for held in (sqlite3.connect(":memory:"), threading.local()):
        assert all("one thread" in bound_to_training(thing) for thing in through(held))


@pytest.mark.parametrize(
    "held",
    [RNG, np.random.RandomState(0), random.Random(0), torch.Generator()],
    ids=lambda held: type(held).__name__,
)
def test_own_generators_are_found(held):
    for thing in through(held):
        assert "its own" in own_generator(thing)


def test_global_names_of_the_code_are_found():
    assert "Linear" in bound_to_training(ByName())
    assert "Generator" in own_generator(ByName())


def test_the_generators_of_the_process_are_no_own_ones():
    def make():
        return choice([1, 2]), np.random.rand(), random.random(), torch.rand(1)

    assert own_generator(make) == ""
    assert bound_to_training(make) == ""


def test_open_files_and_locks_are_shared_by_processes(tmp_path):
    (tmp_path / "x").write_bytes(b"1")
    with (tmp_path / "x").open("rb") as file:
        for held in (file, threading.Lock(), generator_of(1)):
            for thing in through(held):
                assert "cannot share" in shared_by_fork(thing)
        assert "BufferedReader" in shared_by_fork(Holding(files=[file] * 1000))


def test_plain_data_is_not_shared():
    for held in (torch.ones(3), np.ones(3), ["a"] * 10_000, {"a": 1}, lambda x: x, Holding):
        for thing in through(held)[:3]:
            assert shared_by_fork(thing) == ""
            assert own_generator(thing) == ""
            assert bound_to_training(thing) == ""


def test_circles_end():
    one = Holding()
    one.itself = [one]
    assert bound_to_training(one) == ""
