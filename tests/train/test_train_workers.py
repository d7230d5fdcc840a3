"""A fit whose Dataset, generator or PyDataset is slower than its model."""

import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import flatout
from flatout import Recipe
from flatout.recipe import load

SAMPLES, BATCH = 640, 8


class Waiting(Dataset):
    """Each sample waits, as for a disk or a network."""

    def __init__(self):
        self.x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        time.sleep(0.002)
        return self.x[index], int(index) % 2


class Quick(Waiting):
    def __getitem__(self, index):
        return self.x[index], int(index) % 2


def fit(data, workers, epochs, run=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    recipe = Recipe(input={"workers": workers}).replace({"compute.precision": "fp32"})
    trainer = flatout.Trainer(model, loss="cross_entropy", recipe=recipe, allow="exact", run=run)
    history = trainer.fit(data, batch_size=BATCH, epochs=epochs, progress=False)
    return model.state_dict(), history


def check_equal(a, b):
    assert all(torch.equal(a[name], b[name]) for name in b)


@pytest.mark.slow
def test_a_dataset_that_waits_gets_workers_and_the_same_weights(tmp_path):
    epochs = 12
    plain, history = fit(Quick(), 0, epochs)
    assert history.recipe.choices["input.workers"].reason == "asked for"
    found, history = fit(Waiting(), "auto", epochs, tmp_path / "run")
    check_equal(found, plain)
    choice = history.recipe.choices["input.workers"]
    assert choice.value  # where other work leaves no CPU a thread does as well
    assert any(note.startswith("input: ") and "same batches" in note for note in history.notes)
    again = load(tmp_path / "run" / "recipe.toml")
    assert again.input.workers == choice.value
    for workers in (again.input.workers, 2, "thread"):
        check_equal(fit(Waiting(), workers, 1)[0], fit(Quick(), 0, 1)[0])


@pytest.mark.slow
def test_a_short_fit_is_read_as_written():
    found, history = fit(Quick(), "auto", 2)
    check_equal(found, fit(Quick(), 0, 2)[0])
    assert history.recipe.input.workers == 0


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, "thread"])
def test_a_loader_without_workers_trains_the_same_weights_however_it_is_read(workers):
    def trained(workers):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
        recipe = Recipe(input={"workers": workers}).replace({"compute.precision": "fp32"})
        trainer = flatout.Trainer(model, loss="cross_entropy", recipe=recipe, allow="exact")
        loader = DataLoader(Quick(), BATCH, shuffle=True)
        trainer.fit(loader, epochs=2, progress=False)
        return model.state_dict()

    check_equal(trained(workers), trained(0))


def batches():
    generator = np.random.default_rng(0)
    for _ in range(20):
        time.sleep(0.005)
        x = generator.normal(size=(BATCH, 4)).astype(np.float32)
        yield x, (x.sum(1) > 0).astype(np.int64)


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["auto", "thread"])
def test_a_generator_trains_the_same_weights_in_a_thread(workers):
    check_equal(fit(batches, workers, 4)[0], fit(batches, 0, 4)[0])


def test_a_pydataset_trains_the_same_weights_in_a_thread():
    import keras

    class Slow(keras.utils.PyDataset):
        def __len__(self):
            return 12

        def __getitem__(self, index):
            time.sleep(0.005)
            x = np.random.default_rng(index).normal(size=(BATCH, 4)).astype(np.float32)
            return x, (x.sum(1) > 0).astype(np.float32)

    def weights(workers):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.layers.Dense(4, activation="relu"), keras.layers.Dense(1)])
        model.compile(optimizer="adam", loss="mse")
        trainer = flatout.Trainer(model, recipe=Recipe(input={"workers": workers}), allow="exact")
        trainer.fit(Slow(), epochs=3, verbose=0)
        return model.get_weights(), trainer.history.recipe.choices["input.workers"]

    plain, _ = weights(0)
    for workers in ("auto", "thread"):
        found, choice = weights(workers)
        assert all(np.array_equal(a, b) for a, b in zip(found, plain, strict=True))
        assert choice.value in ("thread", 0)
