from __future__ import annotations

import random
from itertools import count, islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.data.randomness import random_state, set_random_state
from flatout.data.sources.datasets.iterable import iterable
from flatout.errors import DataError


def _batches(number=4):
    return [(torch.full((3, 2), float(i)), np.full(3, i)) for i in range(number)]


def _stream(number=4):
    yield from _batches(number)


def _firsts(source, epoch=0, start_step=0):
    return [batch.inputs[0, 0].item() for batch in source.batches(epoch, start_step)]


@settings(deadline=None)
@given(st.integers(1, 8), st.data())
def test_every_kind_gives_its_batches_and_resumes(number, data):
    start = data.draw(st.integers(0, number))
    once = [iterable(_stream(number)), iterable(iter(_batches(number)))]
    again = [iterable(_batches(number)), iterable(lambda: _stream(number))]
    for source in again:
        assert _firsts(source, 0) == _firsts(source, 1) == list(range(number))
    for source in (*once, *again):
        assert _firsts(source, 2, start) == list(range(start, number))


def test_batches_are_converted():
    (batch,) = iterable([(np.ones((3, 2)), torch.ones(3), [1.0, 2.0, 3.0][:0] or np.ones(3))]).peek(
        1
    )
    assert batch.size == 3
    assert batch.inputs.dtype == torch.float64
    assert batch.indices is None


def test_a_one_shot_iterator_serves_one_epoch():
    source = iterable(_stream())
    assert len(_firsts(source)) == 4
    with pytest.raises(DataError, match="epoch 1 finds no batches: 4 have been taken") as error:
        _firsts(source, 1)
    assert "a function that returns a fresh iterator" in error.value.do
    assert "Resume" not in str(error.value)


def test_a_started_epoch_cannot_start_again():
    source = iterable(_stream())
    next(source.batches(0))
    with pytest.raises(DataError, match="1 have been taken"):
        next(source.batches(0))


def test_peeking_gives_a_one_shot_iterator_back():
    source = iterable(_stream())
    assert [batch.inputs[0, 0].item() for batch in source.peek(2)] == [0, 1]
    assert [batch.inputs[0, 0].item() for batch in source.peek(3)] == [0, 1, 2]
    assert _firsts(source) == [0, 1, 2, 3]


def test_an_endless_iterator_goes_on_in_the_next_epoch():
    def endless():
        for i in count():
            yield torch.full((2, 1), float(i))

    source = iterable(endless(), steps=3)
    assert (source.steps, source.counted) == (3, True)
    assert _firsts(source, 0) == [0, 1, 2]
    assert list(islice(_firsts(source, 1), 2)) == [3, 4]
    assert _firsts(iterable(endless(), steps=3), 2, 1) == [7, 8]
    abandoned = iterable(endless(), steps=3)
    next(abandoned.batches(0))
    assert _firsts(abandoned, 1) == [3, 4, 5]
    assert _firsts(iterable(endless, steps=3), 1) == [0, 1, 2]


def test_an_exhausted_iterator_is_said():
    source = iterable(_stream(4), steps=3)
    assert _firsts(source, 0) == [0, 1, 2]
    assert _firsts(source, 1) == [3]
    with pytest.raises(DataError, match="no batches: epoch 2 is empty"):
        _firsts(source, 2)


def test_random_draws_of_the_iterator_come_again_on_resume():
    def shuffled():
        batches = _batches(8)
        random.shuffle(batches)
        for inputs, targets in batches:
            yield inputs + torch.rand(1) + np.random.rand(), targets

    def draw(batch):
        return batch.inputs[0, 0].item(), torch.rand(1).item()

    source = iterable(shuffled)
    list(source.batches(0))
    passing = source.batches(1)
    for _ in range(3):
        draw(next(passing))
    states = source.state_dict(), random_state()
    expected = [draw(batch) for batch in passing]
    resumed = iterable(shuffled)
    torch.manual_seed(1), random.seed(1)
    resumed.load_state_dict(states[0])
    set_random_state(states[1])
    assert [draw(batch) for batch in resumed.batches(1, 3)] == expected


def test_a_list_needs_no_state():
    source = iterable(_batches())
    assert (source.seekable, source.counted, source.steps) == (True, True, 4)
    assert source.state_dict() == {}
    source.load_state_dict({})
    assert _firsts(source, 0, 2) == [2, 3]


def test_an_epoch_that_became_shorter_is_said():
    source = iterable(lambda: _stream(2))
    with pytest.raises(DataError, match="ended after 2 batches, but the run to resume had taken 3"):
        list(source.batches(0, 3))


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        ([], "the list holds no batches"),
        (lambda: iter(()), "no batches: epoch 0 is empty"),
        ([torch.ones(2), np.ones(2)], "a list of 2 arrays can mean"),
        (lambda epoch: None, "expected a function without parameters"),
        (lambda: 3, r"<lambda>\(\) returned int: expected an iterator of batches"),
        ([{"text": "a"}], r"inputs\['text'\]: expected a tensor or a numpy array, found str"),
        ([(torch.ones(2), torch.ones(3))], "inputs and targets differ in length: 2 and 3"),
    ],
)
def test_what_holds_no_batches_is_named(batches, words):
    with pytest.raises(DataError, match=words):
        list(iterable(batches).batches(0))


def test_steps_are_checked():
    with pytest.raises(DataError, match="steps: expected an int of at least 1, found 0"):
        iterable(_batches(), steps=0)
    with pytest.raises(DataError, match="no step 5 to start from: it has 4 steps"):
        iterable(_batches()).batches(0, 5)
    assert iterable(_batches(), steps=2).steps == 2


def test_words_for_people():
    assert iterable(_batches()).describe() == "4 batches of a list, in its own order"
    assert (
        iterable(_stream()).describe()
        == "an unknown number of batches from a generator, which can be read once"
    )
    assert iterable(_stream).describe() == "an unknown number of batches from _stream()"
    assert iterable(_batches()).digest != iterable(_batches(3)).digest
    assert iterable(_stream).labels_range() is None
