import time

import numpy as np
import pytest
from integration_jobs import BATCH, SAMPLES, check_lanes

keras = pytest.importorskip("keras", reason="keras is not installed")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(
        keras.backend.backend() != "torch", reason="Keras runs on another backend than torch"
    ),
]

X = np.random.default_rng(0).normal(size=(SAMPLES, 8)).astype("float32")
Y = np.random.default_rng(1).integers(0, 2, SAMPLES)


class Slow(keras.utils.PyDataset):
    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def __len__(self):
        return SAMPLES // BATCH

    def __getitem__(self, index):
        time.sleep(self.seconds)
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return X[rows], Y[rows]


def _fit(callbacks, *, accumulate=None, model=None, read_s=0.0, evaluate_s=0.0, **options):
    keras.utils.set_random_seed(4)
    layers = [
        keras.layers.Input((8,)),
        keras.layers.Dense(16, activation="relu"),
        keras.layers.Dropout(0.5),
        keras.layers.Dense(2),
    ]
    model = keras.Sequential(layers) if model is None else model()
    model.compile(
        keras.optimizers.Adam(1e-2, gradient_accumulation_steps=accumulate),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        **options,
    )
    began = time.perf_counter()
    model.fit(
        Slow(read_s),
        epochs=2,
        verbose=0,
        callbacks=callbacks,
        validation_data=Slow(evaluate_s),
    )
    return model, model.get_weights(), time.perf_counter() - began


def _timeline():
    from flatout.integrations import KerasTimeline

    return KerasTimeline()


def test_keras_steps_are_seen_and_stay_as_they_were(tmp_path, capfd):
    def others(name):
        return [keras.callbacks.ModelCheckpoint(tmp_path / name / "{epoch}.keras")]

    options = {"accumulate": 2, "read_s": 0.02, "evaluate_s": 0.03}
    _, plain, _ = _fit(others("plain"), **options)
    timeline = _timeline()
    model, seen, seconds = _fit([timeline, *others("seen")], **options)
    assert all(np.array_equal(a, b) for a, b in zip(seen, plain, strict=True))
    assert timeline.timeline.steps == int(model.optimizer.iterations) == 6
    check_lanes(timeline, seconds)
    lanes = timeline.timeline.lanes()
    assert timeline.as_dict()["hidden_in"] == {"copy": "forward"}
    assert 6 * lanes["input"] >= 12 * 20
    assert 6 * lanes["evaluation"] >= 12 * 30
    named = ("forward", "backward", "optimizer", "host", "saving")
    assert min(lanes[name] for name in named) > 0
    assert "flatout: critical lane: " in capfd.readouterr().err
    # The model is as it was, and what was saved meanwhile is whole.
    for it, name in [(model, "compute_loss"), (model, "save"), (model.optimizer, "apply")]:
        assert name not in vars(it)
    saved = keras.saving.load_model(tmp_path / "seen" / "2.keras")
    assert all(np.array_equal(a, b) for a, b in zip(saved.get_weights(), seen, strict=True))


@pytest.mark.slow
def test_what_other_callbacks_do_after_a_batch_is_host_and_not_input():
    class Logs(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            time.sleep(0.02)

    timeline = _timeline()
    _fit([timeline, Logs()])
    assert timeline.timeline.steps == 12
    lanes = timeline.timeline.lanes()
    # That after the last batch of all has no step that it could belong to.
    assert 12 * lanes["host"] >= 11 * 20
    assert lanes["input"] < lanes["host"]


def test_a_step_of_ones_own_hides_what_it_hides():
    class Own(keras.Sequential):
        def train_step(self, data):
            x, y = data
            self.zero_grad()
            loss = keras.losses.sparse_categorical_crossentropy(
                y, self(x, training=True), from_logits=True
            ).mean()
            loss.backward()
            return {"loss": loss}

    timeline = _timeline()
    _fit([timeline], model=lambda: Own([keras.layers.Dense(2)]))
    found = timeline.as_dict()
    assert found["steps"] == 12
    assert found["hidden_in"] == dict.fromkeys(("copy", "backward", "optimizer"), "forward")
    assert found["lanes_ms"]["optimizer"] is None
    assert found["lanes_ms"]["forward"] > 0


@pytest.mark.slow
def test_two_fits_go_on_with_one_timeline():
    timeline = _timeline()
    for fit in (1, 2):
        model, _, _ = _fit([timeline])
        assert timeline.timeline.steps == 12 * fit
    assert "apply" not in vars(model.optimizer)
