"""Compiled Keras models whose tables are stepped by rows: a fit, its words and its files."""

from pathlib import Path

import numpy as np
import pytest
from train_ranks import run_on_two_ranks

import flatout
from flatout.errors import DataError, NumbersError
from flatout.kernels import table_rows
from flatout.measure import usable_cpus

keras = pytest.importorskip("keras")

pytestmark = [
    pytest.mark.skipif(not table_rows.available(), reason="the C extension is absent"),
    pytest.mark.usefixtures("one_thread"),
]

ROWS, WIDTH = 300_000, 8


def network(*behind, **options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((2,), dtype="int64"),
            keras.layers.Embedding(ROWS, WIDTH, name="ids", **options),
            *behind,
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-2, global_clipnorm=0.5), loss)
    return model


def data():
    x = (np.random.default_rng(1).random((160, 2)) ** 4 * ROWS).astype(np.int64)
    return x, (x.sum(1) % 2).astype(np.float32)[:, None]


def fit(model, touched_rows="auto", epochs=2, batch_size=16, **given):
    recipe = flatout.Recipe(compute={"precision": "fp32", "touched_rows": touched_rows})
    trainer = flatout.Trainer(model, recipe=recipe, say=lambda line: None, **given)
    return trainer, trainer.fit(*data(), batch_size=batch_size, epochs=epochs, verbose=0)


def weights_of(model):
    return [np.array(one) for one in model.get_weights()]


def assert_near(ours, dense):
    for found, wanted in zip(ours, dense, strict=True):
        assert np.linalg.norm(found - wanted) <= 1e-5 * np.linalg.norm(wanted)


@pytest.mark.slow
def test_a_fit_ends_as_under_keras_own_optimizer_and_leaves_a_plain_file(tmp_path):
    dense = network()
    fit(dense, "off")
    ours = network()
    trainer, history = fit(ours)
    line = f"tables: 1 of {ROWS:,} rows · touched rows only, dense Adam's result (rounding)"
    assert line in history.notes
    assert trainer.resolved.compute.touched_rows == "on"
    assert_near(weights_of(ours), weights_of(dense))
    trainer.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert all(map(np.array_equal, weights_of(loaded), weights_of(ours)))
    state = [keras.ops.convert_to_numpy(v) for v in dense.optimizer.variables]
    saved = [keras.ops.convert_to_numpy(v) for v in loaded.optimizer.variables]
    assert_near(saved, state)


@pytest.mark.slow
def test_a_file_that_keras_itself_writes_during_the_fit_is_up_to_date(tmp_path):
    found = []
    for touched_rows in ("off", "on"):
        model, path = network(), tmp_path / f"{touched_rows}.keras"

        class Save(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None, path=path):
                if batch == 4:
                    self.model.save(path)

        recipe = flatout.Recipe(compute={"precision": "fp32", "touched_rows": touched_rows})
        trainer = flatout.Trainer(model, recipe=recipe, say=lambda line: None)
        trainer.fit(*data(), batch_size=16, epochs=1, verbose=0, callbacks=[Save()])
        saved = keras.saving.load_model(path)
        state = [keras.ops.convert_to_numpy(v) for v in saved.optimizer.variables]
        found.append((*weights_of(saved), *state))
        assert int(saved.optimizer.iterations) == 5
    assert_near(found[1], found[0])


def test_a_run_that_is_resumed_ends_as_the_whole_one(tmp_path):
    whole = network()
    fit(whole, "on", run=tmp_path / "whole")
    fit(network(), "on", epochs=1, run=tmp_path / "parts")
    resumed = network()
    recipe = flatout.Recipe(compute={"precision": "fp32", "touched_rows": "on"})
    trainer = flatout.Trainer(resumed, recipe=recipe, say=lambda line: None, run=tmp_path / "parts")
    trainer.fit(*data(), batch_size=16, epochs=2, verbose=0, resume=True)
    assert_near(weights_of(resumed), weights_of(whole))


def test_large_tables_that_cannot_be_stepped_by_rows_are_named():
    trainer, history = fit(network(embeddings_regularizer="l2"), epochs=1)
    assert trainer.resolved.compute.touched_rows == "off"
    assert "tables: stepped whole: ids (its regularizer reads all of it)" in history.notes


class Root(keras.layers.Layer):
    """Its gradient at 0 is infinite."""

    def call(self, x):
        return keras.ops.sqrt(keras.ops.abs(x))


@pytest.mark.parametrize("touched_rows", ["on", "off"])
def test_a_row_whose_gradient_is_bad_is_named_and_nothing_is_written(touched_rows):
    model = network(Root())
    weights = weights_of(model)
    weights[0][499] = 0
    model.set_weights(weights)
    x, y = data()
    x, y = x[:16], y[:16]
    x[x == 499] = 498
    x[7, 1] = 499
    recipe = flatout.Recipe(compute={"precision": "fp32", "touched_rows": touched_rows})
    trainer = flatout.Trainer(model, recipe=recipe, say=lambda line: None)
    with pytest.raises(NumbersError, match=r"weight .*ids/embeddings, row 499, read by sample 7\b"):
        trainer.fit(x, y, batch_size=16, epochs=1, verbose=0, shuffle=False)
    assert all(map(np.array_equal, weights_of(model), weights))


@pytest.mark.parametrize("bad", [-1, ROWS, 2**40])
def test_an_id_that_a_table_has_no_row_for_is_named(bad):
    x, y = data()
    x[37, 1] = bad
    recipe = flatout.Recipe(compute={"precision": "fp32", "touched_rows": "on"})
    trainer = flatout.Trainer(network(), recipe=recipe, say=lambda line: None)
    for run in (
        lambda: trainer.fit(x, y, batch_size=16, epochs=1, verbose=0, shuffle=False),
        lambda: trainer.evaluate(x, y),
        lambda: trainer.predict(x),
    ):
        with pytest.raises(
            DataError, match=f"id {bad} is not in 0..{ROWS - 1}, .* table ids"
        ) as told:
            run()
        assert told.value.where == "inputs, column 1, sample 37"


ON_RANKS = """
import os
import sys

import numpy as np

sys.path.insert(0, {here!r})
from test_train_touched_rows_keras import fit, network, weights_of

model = network()
trainer, _ = fit(model, "on", batch_size=25)
assert trainer.resolved.compute.touched_rows == "on"
if os.environ["RANK"] == "0":
    np.savez("weights.npz", *weights_of(model))
"""


@pytest.mark.slow
@pytest.mark.skipif(usable_cpus() < 2, reason="two ranks take two CPUs")
def test_two_ranks_end_with_the_weights_of_one(tmp_path):
    one = network()
    fit(one, "on", batch_size=25)  # batches of which one rank has a sample more
    (tmp_path / "train.py").write_text(ON_RANKS.format(here=str(Path(__file__).parent)))
    done = run_on_two_ranks(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    with np.load(tmp_path / "weights.npz") as found:
        assert_near(list(found.values()), weights_of(one))
