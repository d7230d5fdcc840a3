"""Keras models whose embeddings follow the ids of their data."""

import json

import numpy as np
import pytest
import torch
from train_clicks import Stop, batches, day_ids, write_day
from train_jobs import same

import flatout
from flatout.data import Ids
from flatout.errors import CheckpointError, ModelError

keras = pytest.importorskip("keras")

pytestmark = pytest.mark.usefixtures("one_thread")


def network(rows=40, optimizer="adam", compiled=True):
    keras.backend.clear_session()  # names count from the beginning
    keras.utils.set_random_seed(3)
    ids = keras.Input((4,), dtype="int64", name="ids")
    values = keras.Input((4,), name="values")
    vectors = keras.layers.Embedding(rows, 3, name="vectors")(ids)
    weighed = keras.layers.Multiply()([vectors, keras.layers.Reshape((4, 1))(values)])
    flat = keras.layers.Flatten()(weighed)
    model = keras.Model({"ids": ids, "values": values}, keras.layers.Dense(1)(flat)[:, 0])
    if compiled:
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=[keras.metrics.AUC(from_logits=True, name="auc")])
    return model


def trainer(model, **more):
    return flatout.Trainer(model, **{"allow": "exact", "say": lambda line: None, **more})


def fit(job, path, **more):
    train, held_out = batches(path)
    return job.fit(train, validation_data=held_out, verbose=0, **{"epochs": 1, **more})


def rows_of(job, ids):
    ids, out = np.ascontiguousarray(ids), np.empty_like(ids)
    assert job.signature.ids.maps["ids"].rows_of(ids, out) == -1
    return torch.from_numpy(out)


@pytest.fixture
def days(tmp_path):
    return [write_day(tmp_path, day) for day in range(2)]


def state_of(job):
    return [v.value.clone() for v in job.model.optimizer.variables if v.shape[:1] and v.ndim == 2]


@pytest.mark.parametrize("optimizer", ["adagrad", pytest.param("adam", marks=pytest.mark.slow)])
def test_a_compiled_model_from_day_to_day(days, tmp_path, optimizer):
    job = trainer(network(optimizer=optimizer), run=tmp_path / "one")
    fit(job, days[0])
    layer = job.model.get_layer("vectors")
    size = job.signature.ids.maps["ids"].size
    assert layer.input_dim == layer.embeddings.shape[0] == size > 40
    before = day_ids(0)[:180].reshape(-1)
    old = layer.embeddings.value[rows_of(job, before)].clone()
    slot = next(v for v in job.model.optimizer.variables if tuple(v.shape) == (size, 3))
    moments = slot.value[rows_of(job, before)].clone()
    expected = job.evaluate(batches(days[1])[1])

    said = []
    kept = network(rows=9, optimizer=optimizer)
    nothing = trainer(kept, warm_start=tmp_path / "one", lr_rule=None, say=said.append)

    class Look(flatout.Callback):
        def on_fit_start(self, state):
            layer = kept.get_layer("vectors")
            now = rows_of(nothing, before)
            assert torch.equal(layer.embeddings.value[now], old)
            shape = tuple(layer.embeddings.shape)
            slot = next(v for v in kept.optimizer.variables if tuple(v.shape) == shape)
            assert torch.equal(slot.value[now], moments)
            new = np.setdiff1d(day_ids(1)[:180], before)
            begins = 0.1 if optimizer == "adagrad" else 0.0
            assert (slot.value[rows_of(nothing, new)] == begins).all()
            self.looked = True

    look = Look()
    fit(nothing, days[1], callbacks=[look])
    assert look.looked
    told = [line for line in said if line.startswith("before training")]
    assert told == [f"before training: val auc {expected['auc']:.4g}, loss {expected['loss']:.4g}"]


@pytest.mark.slow
def test_a_resume_is_bitwise(days, tmp_path):
    from flatout.recipe import Recipe, Save

    fit(trainer(network(), run=tmp_path / "one"), days[0])

    given = {"warm_start": tmp_path / "one", "recipe": Recipe(save=Save(every=3))}
    whole = trainer(network(), run=tmp_path / "whole", **given)
    fit(whole, days[1], callbacks=[Stop(0)])
    with pytest.raises(RuntimeError, match="crash"):
        fit(trainer(network(), run=tmp_path / "cut", **given), days[1], callbacks=[Stop(5)])
    again = trainer(network(rows=7), run=tmp_path / "cut", **given)
    fit(again, days[1], callbacks=[Stop(0)], resume=True)
    assert same(again.model, whole.model)


@pytest.mark.slow
def test_a_keras_file_is_a_plain_model(days, tmp_path):
    job = trainer(network(), run=tmp_path / "one")
    fit(job, days[0])
    held_out = batches(days[1])[1]
    expected = job.predict(held_out)
    path = job.save(tmp_path / "day.keras")
    from safetensors import safe_open

    with safe_open(tmp_path / "day.ids.safetensors", "pt") as file:
        told = json.loads(file.metadata()["ids"])["columns"]["ids"]
        known, rows = file.get_tensor("ids.ids"), file.get_tensor("ids.rows")
    model = keras.saving.load_model(path)
    ids = torch.from_numpy(day_ids(1)[180:])
    at = torch.searchsorted(known, ids).clamp(max=len(known) - 1)
    found = torch.where(known[at] == ids, rows[at], told["firsts"][0])
    with torch.no_grad():
        served = model({"ids": found, "values": torch.ones(60, 4)})
    assert np.array_equal(served.numpy(), expected)

    other = trainer(network(rows=9))
    other.load(path)
    assert np.array_equal(other.predict(held_out), expected)
    (tmp_path / "day.ids.safetensors").unlink()
    with pytest.raises(CheckpointError, match="which was not found"):
        trainer(network(rows=9)).load(path)


@pytest.mark.slow
def test_a_model_that_is_not_compiled(days, tmp_path):
    given = {"loss": "binary_cross_entropy", "optimizer": "adam", "metrics": ["auc"]}
    job = trainer(network(compiled=False), run=tmp_path / "one", **given)
    train, held_out = batches(days[0])
    job.fit(train, validation_data=held_out, progress=False)
    next_day = trainer(network(9, compiled=False), warm_start=tmp_path / "one", **given)
    train, held_out = batches(days[1])
    next_day.fit(train, validation_data=held_out, progress=False)
    layer = next_day.model.get_layer("vectors")
    assert layer.input_dim == next_day.signature.ids.maps["ids"].size


def test_two_tables_of_one_name_are_refused():
    def tower(name):
        ids = keras.Input((), dtype="int64")
        return keras.Model(ids, keras.layers.Embedding(9, 4, name="ids")(ids), name=name)

    both = {name: keras.Input((), dtype="int64", name=name) for name in ("site", "user")}
    outputs = keras.layers.Concatenate()([tower(f"{name}s")(both[name]) for name in both])
    model = keras.Model(both, keras.layers.Dense(1)(outputs)[:, 0])
    model.compile("adam", keras.losses.BinaryCrossentropy(from_logits=True))
    rows = {name: np.arange(32) % 7 for name in both} | {"y": np.zeros(32, np.float32)}
    stated = flatout.data.table(rows, target="y").schema.with_ids(site=Ids(), user=Ids())
    with pytest.raises(ModelError, match="two tables of the model are called 'ids'"):
        trainer(model).fit(flatout.data.table(rows, schema=stated).batch(8), verbose=0)
