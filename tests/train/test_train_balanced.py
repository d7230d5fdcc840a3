"""class_weight="balanced": weights counted from the data."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from train_jobs import data, network, same, trainer

import flatout
from flatout.errors import DataError, ModelError
from flatout.train.losses.class_counts import balanced_weights, balanced_words, count

pytestmark = pytest.mark.usefixtures("one_thread")


def skewed():
    x, y = data()
    return x, torch.where(torch.arange(len(y)) % 5 == 0, y, torch.zeros_like(y))


def test_weights_are_scikit_learns():
    from sklearn.utils.class_weight import compute_class_weight

    y = np.random.default_rng(0).choice([0, 2, 5], 200, p=[0.7, 0.25, 0.05])
    found = balanced_weights(count(torch.tensor(y)))
    expected = compute_class_weight("balanced", classes=np.unique(y), y=y)
    assert list(found) == [0, 2, 5]
    assert list(found.values()) == pytest.approx(expected.tolist())
    assert balanced_words({0: 30, 1: 10}, ("cat", "dog")) == (
        "class_weight balanced: cat 0.667 (30 samples), dog 2 (10 samples)"
    )


class Told(torch.utils.data.Dataset):
    def __init__(self, x, y):
        self.x, self.targets = x, y.tolist()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, number):
        return self.x[number], self.targets[number]


@pytest.mark.parametrize("kind", ["arrays", "pipeline", "mapped", "Dataset"])
def test_they_are_counted_from_any_data(kind):
    x, y = skewed()
    weights = balanced_weights(count(y))
    given = {
        "arrays": (x, y),
        "pipeline": flatout.data.arrays(x, y).shuffle(seed=0),
        "mapped": flatout.data.arrays(x, y + 1).map(lambda x, y: (x, y - 1)).shuffle(seed=0),
        "Dataset": Told(x, y),
    }[kind]
    lines, models = [], []
    for weight in ("balanced", weights):
        models.append(network(norm=False, dropout=0.0))
        fits = flatout.Trainer(models[-1], optimizer="sgd", lr=0.1, say=lines.append)
        fits.fit(given, batch_size=32, epochs=2, class_weight=weight, progress=False)
    assert same(*models)
    (told,) = [line for line in lines if line.startswith("class_weight balanced")]
    assert f"({count(y)[0]} samples)" in told


def test_balanced_data_weigh_alike():
    x, y = skewed()
    lines = []
    source = flatout.data.arrays(x, y).balance("over").shuffle(seed=0)
    fits = flatout.Trainer(network(), say=lines.append)
    fits.fit(source, batch_size=32, class_weight="balanced", progress=False)
    assert any("balanced: 0 1 (" in line and "1 1 (" in line for line in lines)


def test_labels_that_are_ignored_are_not_counted():
    x, y = skewed()
    y[:10] = -100
    lines = []
    fits = flatout.Trainer(network(), say=lines.append)
    fits.fit((x, y), batch_size=32, class_weight="balanced", progress=False)
    assert any(f"({int((y == 0).sum())} samples)" in line for line in lines)


def test_what_cannot_be_counted():
    x, y = data()
    loader = DataLoader(TensorDataset(x, y), batch_size=32)
    with pytest.raises(DataError, match="cannot be counted without reading all batches"):
        trainer(network()).fit(loader, class_weight="balanced")
    with pytest.raises(ModelError, match="needs one class per sample, found targets of shape"):
        trainer(nn.Linear(12, 2), loss="mse").fit((x, x[:, :2]), class_weight="balanced")
    with pytest.raises(ModelError, match="found a str"):
        trainer(network()).fit((x, y), class_weight="even")


@pytest.mark.parametrize("kind", ["arrays", "pipeline"])
def test_a_compiled_keras_model(kind):
    keras = pytest.importorskip("keras")
    x, y = (part.numpy() for part in skewed())
    weights = balanced_weights(count(torch.tensor(y)))
    losses = []
    for weight in ("balanced", weights):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.layers.Input((12,)), keras.layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss)
        given = (x, y) if kind == "arrays" else (flatout.data.arrays(x, y).batch(32), None)
        fits = flatout.Trainer(model, say=lambda line: None)
        losses.append(fits.fit(*given, verbose=0, class_weight=weight).history["loss"])
    assert losses[0] == losses[1]
    with pytest.raises(DataError, match="one array, found none"):
        fits.fit([(x, y)], verbose=0, class_weight="balanced")
