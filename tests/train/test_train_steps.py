"""Epochs and fits with a number of steps that the user sets, for any data."""

import itertools

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset
from train_jobs import data, network, quiet, same

import flatout
from flatout.data.source import as_source
from flatout.errors import DataError, ModelError

pytestmark = pytest.mark.usefixtures("one_thread")
X, Y = data(samples=96)
BATCHES = [(X[i : i + 16], Y[i : i + 16]) for i in range(0, 96, 16)]


def endless():
    """Yield batches without end; each call begins with the first batch."""
    return itertools.cycle(BATCHES)


class Stream(IterableDataset):
    def __iter__(self):
        return (pair for batch in endless() for pair in zip(*batch, strict=True))


def loader():
    table = TensorDataset(X, Y)
    drawn = RandomSampler(
        table, replacement=True, num_samples=10**10, generator=torch.Generator().manual_seed(0)
    )
    return DataLoader(table, batch_size=16, sampler=drawn)


SOURCES = {
    "arrays": lambda: (X, Y),
    "dataset": lambda: TensorDataset(X, Y),
    "loader": loader,
    "stream": lambda: DataLoader(Stream(), batch_size=16),
    "function": lambda: endless,
    "generator": lambda: endless(),
    "list": lambda: list(BATCHES),
    "pipeline": lambda: flatout.data.arrays(X, Y).shuffle(seed=1).batch(16),
}


def fit(given, *, model=None, callbacks=(), **options):
    model = model or network(0)
    trainer = flatout.Trainer(
        model, optimizer="sgd", lr=0.1, allow="exact", run=options.pop("run", None), say=quiet
    )
    size = 16 if isinstance(given, (tuple, TensorDataset)) else None
    options = {"batch_size": size, "verbose": 0, "callbacks": callbacks, **options}
    return model, trainer.fit(given, **options)


@pytest.mark.parametrize("kind", SOURCES)
def test_an_epoch_is_as_long_as_asked_for(kind):
    _, history = fit(SOURCES[kind](), epochs=3, steps_per_epoch=4)
    assert (len(history.epochs), history.timeline.steps) == (3, 12)


@pytest.mark.parametrize("kind", SOURCES)
def test_training_ends_after_as_many_steps_as_asked_for(kind):
    seen = []

    class Count(flatout.Callback):
        def on_step(self, state):
            seen.append(state.step)

    _, history = fit(
        SOURCES[kind](), epochs=9, max_steps=7, validation_data=(X, Y), callbacks=[Count()]
    )
    assert seen == list(range(1, 8))
    assert history.timeline.steps == 7
    assert history.stop_reason == "7 steps were made, the max_steps of this fit"
    assert history.epochs[-1]["val_loss"] > 0  # an unfinished epoch has figures too


@pytest.mark.parametrize("kind", ["arrays", "function", "list", "pipeline"])
def test_epochs_go_on_where_the_last_one_ended(kind):
    """Compare with epochs of six batches, which is the data's own length."""
    plain, _ = fit(SOURCES["list" if kind == "function" else kind](), epochs=2)
    for epochs, steps in ((3, 4), (4, 3), (1, 12), (6, 2)):
        cut, _ = fit(SOURCES[kind](), epochs=epochs, steps_per_epoch=steps)
        assert same(plain, cut), (epochs, steps)


@pytest.mark.parametrize("kind", ["arrays", "function", "list", "pipeline"])
def test_a_resume_goes_on_within_the_steps(kind, tmp_path):
    whole, _ = fit(SOURCES[kind](), epochs=4, steps_per_epoch=4)
    fit(SOURCES[kind](), epochs=3, steps_per_epoch=4, run=tmp_path / "run")
    resumed, _ = fit(
        SOURCES[kind](), epochs=4, steps_per_epoch=4, run=tmp_path / "run", resume=True
    )
    assert same(whole, resumed)


def test_each_validation_reads_the_same_first_batches():
    _, history = fit(
        BATCHES, epochs=3, validation_data=endless, validation_steps=2, steps_per_epoch=1
    )
    model, again = fit(BATCHES, epochs=3, steps_per_epoch=1)
    trainer = flatout.Trainer(model, allow="exact", say=quiet)
    expected = trainer.evaluate((X[:32], Y[:32]), batch_size=16)["loss"]
    assert history.epochs[-1]["val_loss"] == pytest.approx(expected)
    assert trainer.evaluate(endless, steps=2)["loss"] == pytest.approx(expected)
    assert len(trainer.predict(X, batch_size=16, steps=2)) == 32
    assert again.history["loss"] == history.history["loss"]


def test_epochs_that_end_before_the_steps_are_reported():
    _, history = fit(BATCHES, epochs=1, max_steps=100)
    assert "epochs=1 ended training after 6 steps, before max_steps=100" in history.notes[-1]


def test_numbers_of_steps_that_make_no_sense():
    with pytest.raises(DataError, match="0"):
        fit(BATCHES, steps_per_epoch=0)
    with pytest.raises(ModelError, match="found 0"):
        fit(BATCHES, max_steps=0)


def test_an_iterator_that_ends_too_soon_is_named():
    with pytest.raises(DataError, match="gives each of them once"):
        fit(iter(BATCHES), epochs=4, steps_per_epoch=4)


def test_stretches_of_a_source_begin_at_any_step():
    cut = flatout.data.Stretches(as_source((X, Y), batch_size=16, seed=3), 4)
    plain = as_source((X, Y), batch_size=16, seed=3)
    every = [b.indices.tolist() for epoch in range(4) for b in plain.batches(epoch)]
    for epoch, start in ((5, 1), (0, 0), (1, 2), (1, 3)):
        first = epoch * 4 + start
        given = [batch.indices.tolist() for batch in cut.batches(epoch, start)]
        assert given == every[first : (epoch + 1) * 4]
