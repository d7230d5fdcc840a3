"""What an iterable dataset gives again from memory is what it would have made."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.cures import record
from flatout.cures.stream import Stream

ROOM = 10**9


MADE: list[int] = []  # what datasets have made


class Numbers:
    """Gives what it is told to in each epoch."""

    epoch = 0

    def __init__(self, *epochs) -> None:
        self._epochs = iter(epochs)

    def __iter__(self):
        for sample in next(self._epochs):
            MADE.append(1)
            yield sample


@pytest.fixture(autouse=True)
def _nothing_made():
    record.begin({"script.cache": "memory"})
    MADE.clear()


def same(one, other) -> bool:
    if isinstance(one, torch.Tensor):
        return type(one) is type(other) and torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def tensors(length: int, *, ragged: bool = True) -> list:
    return [
        (torch.full((4 if at < length - 1 or not ragged else 2, 3), float(at)), at)
        for at in range(length)
    ]


@settings(max_examples=60)
@given(st.integers(0, 9), st.lists(st.integers(0, 10), min_size=1, max_size=7))
def test_epochs_that_break_off_anywhere_are_those_of_the_dataset(length, taken):
    samples = tensors(length)
    dataset = Numbers(*[samples] * len(taken))
    stream = Stream("script.cache", dataset, ROOM)
    for most in taken:
        given_ = iter(stream.epoch(dataset, iter(dataset)))
        found = [next(given_, None) for _ in range(most)]
        wanted = [*samples, *[None] * most][:most]
        assert all(
            same(one, other) if other is not None else one is None
            for one, other in zip(found, wanted, strict=True)
        )
    assert record.left() == []


def test_the_third_epoch_asks_for_nothing_and_gives_copies():
    samples = tensors(5)
    dataset = Numbers(*[samples] * 4)
    stream = Stream("script.cache", dataset, ROOM)
    full = []
    for epoch in range(4):
        given_ = stream.epoch(dataset, iter(dataset))
        full.append(record.is_full())
        for (x, y), (wanted, label) in zip(given_, tensors(5), strict=True):
            assert torch.equal(x, wanted)
            assert y == label
            if epoch > 1:
                x += 1  # it is the script's own
    assert len(MADE) == 2 * 5
    assert full == [False, False, True, True]


@pytest.mark.parametrize(
    ("epochs", "why"),
    [
        ([tensors(5), tensors(4, ragged=False)], "Numbers gives fewer samples than in the epoch"),
        ([tensors(4, ragged=False), tensors(5)], "Numbers gives more samples than in the epoch"),
        ([tensors(5), tensors(5)[::-1]], "samples of Numbers are not the same in each epoch"),
        ([[1.0, 2.0], [1.0, 2]], "samples of Numbers are not the same in each epoch"),
        ([["a", "b"], ["a", "b"]], "samples of Numbers are not made of tensors, arrays and"),
    ],
)
def test_what_differs_is_given_as_it_is_made_and_told(epochs, why):
    epochs = [*epochs, *epochs, *epochs]
    dataset = Numbers(*epochs)
    stream = Stream("script.cache", dataset, ROOM)
    for wanted in epochs:
        found = list(stream.epoch(dataset, iter(dataset)))
        assert len(found) == len(wanted)
        assert all(map(same, found, wanted))
    ((_, told),) = record.left()
    assert told.startswith(why)
    assert not stream.is_kept
    assert record.is_full()


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: torch.rand(())])
def test_what_draws_random_numbers_is_not_kept_though_it_gives_the_same(draw):
    def drawing():
        for sample in tensors(4):
            draw()
            yield sample

    dataset = Numbers(drawing(), drawing())
    stream = Stream("script.cache", dataset, ROOM)
    for _ in range(2):
        assert len(list(stream.epoch(dataset, iter(dataset)))) == 4
    assert record.left() == [("script.cache", "Numbers draws random numbers")]


def test_a_dataset_that_changes_between_epochs_is_not_kept():
    dataset = Numbers(tensors(3), tensors(3))
    stream = Stream("script.cache", dataset, ROOM)
    list(stream.epoch(dataset, iter(dataset)))
    dataset.epoch = 7
    list(stream.epoch(dataset, iter(dataset)))
    assert record.left() == [("script.cache", "Numbers.epoch is different in each epoch")]


def test_memory_is_not_filled_and_what_was_kept_is_let_go():
    samples = [torch.zeros(1000) for _ in range(10)]
    dataset = Numbers(*[samples] * 3)
    stream = Stream("script.cache", dataset, room=5 * 4200)
    for _ in range(3):
        assert len(list(stream.epoch(dataset, iter(dataset)))) == 10
    assert len(MADE) == 30
    assert record.left() == [("script.cache", "memory has no room for the samples of Numbers")]
    assert stream._rows == []


def test_what_gives_up_within_an_epoch_goes_on_where_it_was():
    first = tensors(6, ragged=False)
    other = [*first[:4], (torch.zeros(4, 3), 77), first[5]]
    dataset = Numbers(first, first, first, other, other)
    stream = Stream("script.cache", dataset, ROOM)
    for _ in range(2):  # three samples are known to be alike
        begun = iter(stream.epoch(dataset, iter(dataset)))
        assert [next(begun)[1] for _ in range(3)] == [0, 1, 2]
    for labels in ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 77, 5], [0, 1, 2, 3, 77, 5]):
        assert [label for _, label in stream.epoch(dataset, iter(dataset))] == labels
    ((_, told),) = record.left()
    assert told == "samples of Numbers are not the same in each epoch"
