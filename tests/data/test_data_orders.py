"""The next epoch's order, made while this one runs, is the order that it would have had."""

import numpy as np
import pytest

from flatout.data.execution import batch_sampler
from flatout.data.execution.batch_sampler import BatchSampler, Orders
from flatout.data.stages.shuffle import shuffled


@pytest.fixture
def made(monkeypatch):
    """Epochs in the order in which someone asked for their order."""
    monkeypatch.setattr(batch_sampler, "usable_cpus", lambda: 2)
    asked = []

    def order(epoch):
        asked.append(epoch)
        return plain(epoch)

    plain = shuffled(lambda epoch: np.arange(100), 5)
    return Orders(BatchSampler(100, 8, order), many=10), asked, plain


def test_it_is_made_once(made):
    ahead, asked, plain = made
    assert np.array_equal(ahead.of(0), plain(0))
    ahead.prepare(1)
    ahead.prepare(1)
    assert np.array_equal(ahead.of(1), plain(1))
    assert asked == [0, 1]


def test_another_epoch_than_the_expected_one_has_its_own(made):
    ahead, asked, plain = made
    ahead.prepare(1)
    assert np.array_equal(ahead.of(7), plain(7))
    assert np.array_equal(ahead.of(1), plain(1))
    assert asked == [1, 7, 1]


def test_an_error_comes_where_the_order_is_wanted(monkeypatch):
    monkeypatch.setattr(batch_sampler, "usable_cpus", lambda: 2)

    def broken(epoch):
        raise MemoryError(f"epoch {epoch}")

    ahead = Orders(BatchSampler(100, 8, broken), many=10)
    ahead.prepare(1)
    with pytest.raises(MemoryError, match="epoch 1"):
        ahead.of(1)


def test_what_costs_nothing_or_too_much_is_not_made_ahead(monkeypatch, made):
    ahead, asked, _ = made
    monkeypatch.setattr(batch_sampler, "available_bytes", lambda: 1000)
    ahead.prepare(1)
    monkeypatch.setattr(batch_sampler, "available_bytes", lambda: 1 << 40)
    Orders(BatchSampler(100, 8, lambda epoch: asked.append(epoch)), many=101).prepare(1)
    monkeypatch.setattr(batch_sampler, "usable_cpus", lambda: 1)
    ahead.prepare(1)
    monkeypatch.setattr(batch_sampler, "usable_cpus", lambda: 2)
    numbers = np.arange(100)
    given = Orders(BatchSampler(100, 8, lambda epoch: numbers, shuffle=False), many=10)
    given.prepare(1)
    assert asked == []
    assert given.of(1) is numbers
