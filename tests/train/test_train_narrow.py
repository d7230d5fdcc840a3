"""float64, numpy's own dtype, for models of float32."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import flatout

DRAWN = np.random.default_rng(0)
X, Y = DRAWN.normal(size=(64, 4)), DRAWN.normal(size=64)


def _trainer(said, **arguments):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
    return flatout.Trainer(
        model, loss="mse", lr=0.01, seed=0, say=said.append, metrics=["mae"], **arguments
    )


def _frames():
    polars = pytest.importorskip("polars")
    return polars.DataFrame(X), polars.Series(Y)


KINDS = {
    "arrays": lambda: (X, Y),
    "tensors": lambda: (torch.tensor(X), torch.tensor(Y)),
    "frames": _frames,
    "targets": lambda: (X.astype(np.float32), Y),
}


def _casts(said):
    return [line for line in said if "cast to float32" in line]


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_cast_and_said_once(kind):
    plain, said = _trainer([]), []
    wanted = plain.fit(X.astype(np.float32), Y.astype(np.float32), epochs=3, progress=False)
    trainer = _trainer(said)
    x, y = KINDS[kind]()
    found = trainer.fit(x, y, validation_data=(x, y), epochs=3, progress=False)
    assert found.epochs[-1]["loss"] == wanted.epochs[-1]["loss"]
    for ours, theirs in zip(trainer.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert len(_casts(said)) == 1
    assert "float64" in _casts(said)[0]
    if kind != "targets":
        # A frame's columns lie one behind the other, which rounds a product otherwise.
        torch.testing.assert_close(trainer.predict(x), plain.predict(X.astype(np.float32)))


def test_loaders_evaluation_and_prediction_cast_too():
    said = []
    trainer = _trainer(said)
    dataset = TensorDataset(torch.tensor(X), torch.tensor(Y))
    trainer.fit(DataLoader(dataset, batch_size=16), epochs=1, progress=False)
    alone = _trainer(said)
    assert alone.evaluate(X, Y)["loss"] == alone.evaluate(X.astype("f4"), Y.astype("f4"))["loss"]
    assert alone.predict(X).dtype == torch.float32


def test_a_model_of_float64_gets_what_it_is_given():
    said = []
    model = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)).double()
    trainer = flatout.Trainer(model, loss="mse", lr=0.01, say=said.append)
    trainer.fit(X, Y, epochs=1, progress=False)
    assert trainer.predict(X).dtype == torch.float64
    assert not _casts(said)


def test_an_uncompiled_keras_model_says_so_once_too():
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "torch":
        pytest.skip("Keras is on another backend")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    said = []
    trainer = flatout.Trainer(model, loss="mse", lr=0.01, say=said.append)
    trainer.fit(X, Y, validation_data=(X, Y), epochs=2, progress=False)
    assert len(_casts(said)) == 1
