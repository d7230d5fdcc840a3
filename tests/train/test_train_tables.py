"""Ids outside of an embedding table are named: table, id, column, sample, file and line."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from train_jobs import quiet, trainer

import flatout
from flatout.errors import DataError


class Ids(nn.Module):
    """A table for each of two columns, and a bag over a third input."""

    def __init__(self, rows=10):
        super().__init__()
        self.users = nn.Embedding(rows, 4)
        self.items = nn.Embedding(rows, 4)
        self.words = nn.EmbeddingBag(rows, 4)
        self.last = nn.Linear(12, 2)

    def forward(self, pairs, words):
        found = [self.users(pairs[:, 0]), self.items(pairs[:, 1]), self.words(words)]
        return self.last(torch.cat(found, 1))


def rows(samples=64):
    draw = np.random.default_rng(0)
    return draw.integers(0, 10, (samples, 2)), draw.integers(0, 10, (samples, 3))


def fitted(pairs, words, shuffle=False, **options):
    job = trainer(Ids())
    y = torch.arange(len(pairs)) % 2
    job.fit((pairs, words), y, batch_size=16, shuffle=shuffle, progress=False, **options)


@pytest.mark.parametrize("sample", [5, 60], ids=["first batch", "later step"])
@pytest.mark.parametrize(
    ("table", "part", "column", "bad"),
    [("users", 0, 0, 10), ("items", 0, 1, -1), ("words", 1, 2, 99)],
)
def test_the_id_is_named(table, part, column, bad, sample):
    parts = rows()
    parts[part][sample, column] = bad
    with pytest.raises(DataError) as caught:
        fitted(*parts)
    assert caught.value.what == f"id {bad} is not in 0..9, the rows of the embedding table {table}"
    assert caught.value.where == f"inputs[{part}], column {column}, sample {sample}"


def test_a_shuffled_sample_keeps_its_number():
    pairs, words = rows()
    pairs[40, 1] = 12
    with pytest.raises(DataError, match="id 12 is not in") as caught:
        fitted(pairs, words, shuffle=True)
    assert caught.value.where == "inputs[0], column 1, sample 40"


EMBEDDING = torch.embedding


def embedding_as_on_a_gpu(weight, ids, *options):
    """Where torch finds an id outside there, the process can use the GPU no more."""
    if bool(((ids < 0) | (ids >= len(weight))).any()):
        raise SystemExit("device-side assert triggered")
    return EMBEDDING(weight, ids, *options)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_validation_evaluation_and_prediction(on_gpu, monkeypatch):
    if on_gpu:
        monkeypatch.setattr("flatout.train.tables.tables.ends_the_device", lambda batch: True)
        monkeypatch.setattr(torch, "embedding", embedding_as_on_a_gpu)
    pairs, words = rows()
    bad = pairs.copy()
    bad[3, 0] = 10
    y = torch.arange(len(pairs)) % 2
    with pytest.raises(DataError, match="the validation data do not fit: id 10 is not in 0") as e:
        fitted(pairs, words, validation_data=((bad, words), y))
    assert e.value.where == "inputs[0], column 0, sample 3"
    job = trainer(Ids())
    job.evaluate((pairs, words), y)
    for run in (
        lambda: job.evaluate((bad, words), y),
        lambda: job.predict((bad, words)),
        lambda: job.worst((bad, words), y),
    ):
        with pytest.raises(DataError, match="id 10 is not in 0") as caught:
            run()
        assert caught.value.where == "inputs[0], column 0, sample 3"


def test_file_and_line(tmp_path):
    path = tmp_path / "ids.csv"
    lines = [f"{i % 10},{i % 7},{i % 2}" for i in range(50)]
    lines[41] = "3,77,1"
    path.write_text("\n".join(["user,item,label", *lines]) + "\n")

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(10, 4)
            self.last = nn.Linear(8, 2)

        def forward(self, user, item):
            both = torch.stack([user, item], 1)
            return self.last(self.table(both).flatten(1))

    source = flatout.data.csv(path, target="label").shuffle(seed=1).batch(10)
    with pytest.raises(DataError, match=r"id 77 is not in 0\.\.9") as caught:
        trainer(Two()).fit(source, progress=False)
    assert caught.value.where.startswith("inputs['item'], sample 41 (")
    assert f"{path}:43" in caught.value.where


def test_other_errors_stay_as_they_are():
    class Breaks(Ids):
        steps = 0

        def forward(self, pairs, words):
            if self.training and torch.is_grad_enabled():
                raise IndexError("something else")
            return super().forward(pairs, words)

    pairs, words = rows()
    with pytest.raises(IndexError, match="something else"):
        trainer(Breaks()).fit((pairs, words), torch.arange(64) % 2, progress=False)


def test_tables_of_keras():
    import keras
    from keras import layers

    model = keras.Sequential(
        [layers.Input((3,), dtype="int32"), layers.Embedding(10, 4, name="words"),
         layers.Flatten(), layers.Dense(2)]
    )  # fmt: skip
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss)
    x = rows()[1].astype("int32")
    y = np.arange(64) % 2

    def fit():
        flatout.Trainer(model, say=quiet).fit(x, y, batch_size=16, shuffle=False, verbose=0)

    job = flatout.Trainer(model, say=quiet)
    for bad in (10, -1):  # Keras counts the last from the end
        x[60, 2] = bad
        for run in (fit, lambda: job.evaluate(x, y), lambda: job.predict(x)):
            with pytest.raises(DataError, match=rf"id {bad} is not in 0\.\.9.* words") as caught:
                run()
            assert caught.value.where == "inputs, column 2, sample 60"


class Reads(nn.Module):
    """Reads two plain parameters, each by a column."""

    def __init__(self, read):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(10, 4))
        self.inner = nn.Module()
        self.inner.table = nn.Parameter(torch.randn(10, 4))
        self.last = nn.Linear(8, 2)
        self.read = read

    def forward(self, pairs):
        first, second = pairs[:, 0], pairs[:, 1]
        return self.last(torch.cat([self.read(self.weight, first), self.inner.table[second]], 1))


@pytest.mark.parametrize("sample", [5, 60], ids=["first batch", "later step"])
@pytest.mark.parametrize(
    "read",
    [
        lambda table, ids: F.embedding(ids, table),
        lambda table, ids: F.embedding(weight=table, input=ids),
        lambda table, ids: F.embedding_bag(ids[:, None], table),
        lambda table, ids: table[ids],
        lambda table, ids: table[ids, :],
        lambda table, ids: torch.index_select(table, 0, ids),
        lambda table, ids: table.index_select(dim=0, index=ids),
    ],
)
def test_tables_that_functions_and_operators_read(read, sample):
    pairs = rows()[0]
    y = torch.arange(64) % 2
    for column, name in ((0, "weight"), (1, "inner.table")):
        bad = pairs.copy()
        bad[sample, column] = 11
        with pytest.raises(DataError, match="id 11 is not in 0") as caught:
            trainer(Reads(read)).fit(bad, y, batch_size=16, shuffle=False, progress=False)
        assert caught.value.what.endswith(f"0..9, the rows of the embedding table {name}")
        assert caught.value.where == f"inputs, column {column}, sample {sample}"
    # An operator counts negative numbers from the end.
    pairs[sample, 1] = -1
    trainer(Reads(read)).fit(pairs, y, batch_size=16, shuffle=False, progress=False)


def test_a_table_that_is_computed_has_its_shape_for_a_name():
    pairs = rows()[0]
    pairs[5, 0] = 11
    with pytest.raises(DataError, match=r"embedding table of shape \(10, 4\)"):
        trainer(Reads(lambda table, ids: F.embedding(ids, 2 * table))).fit(
            pairs, torch.arange(64) % 2, batch_size=16, progress=False
        )
