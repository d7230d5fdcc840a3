"""A resumed fit of a compiled Keras model finds what the script has changed."""

from __future__ import annotations

import numpy as np
import pytest

keras = pytest.importorskip("keras")
from keras import layers  # noqa: E402

import flatout  # noqa: E402
from flatout.errors import CheckpointError, DataError  # noqa: E402

if keras.backend.backend() != "torch":
    pytest.skip("Keras is on another backend", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("one_thread")


def points(seed=0):
    random = np.random.default_rng(seed)
    x = random.normal(size=(96, 5)).astype("float32")
    return x, (x @ random.normal(size=(5, 3))).argmax(1)


def network(drop=0.2, activation="relu"):
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            layers.Input((5,)),
            layers.Dense(16, activation=activation),
            layers.Dropout(drop),
            layers.Dense(3, activation="softmax"),
        ]
    )


def compiled(optimizer=None, model=None, *, loss="sparse_categorical_crossentropy", metrics=()):
    model = model or network()
    optimizer = optimizer or keras.optimizers.Adam(0.01)
    model.compile(optimizer, loss, metrics=list(metrics))
    return model


def fit(model, run, epochs=1, *, say=lambda line: None, source=None, **options):
    trainer = flatout.Trainer(model, run=run, allow="exact", say=say)
    x, y = source or points()
    options = {"batch_size": 16, "verbose": 0, "resume": run is not None, **options}
    return trainer.fit(x, y, epochs=epochs, **options)


def own_loss(factor):
    def own(y_true, y_pred):
        return factor * keras.losses.sparse_categorical_crossentropy(y_true, y_pred)

    return own


def residual(twice):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((5,))
    first = layers.Dense(5)(inputs)
    second = layers.Dense(5)(first)
    joined = layers.Add()([first if twice else inputs, second])
    return keras.Model(inputs, layers.Dense(3, activation="softmax")(joined))


Adam, SGD = keras.optimizers.Adam, keras.optimizers.SGD

REFUSED = {
    "loss": (
        {},
        {"loss": keras.losses.SparseCategoricalCrossentropy(ignore_class=0)},
        "  loss\n    then: sparse_categorical_crossentropy\n",
    ),
    "the code of a loss": ({"loss": own_loss(1)}, {"loss": own_loss(2)}, "own (code "),
    "metrics": ({}, {"metrics": ["accuracy"]}, "  metrics\n    then: none\n    now:  accuracy"),
    "clipnorm": ({}, {"optimizer": Adam(0.01, clipnorm=1.0)}, "  clipnorm of Adam\n    then: None"),
    "amsgrad": ({}, {"optimizer": Adam(0.01, amsgrad=True)}, "  amsgrad of Adam\n    then: False"),
    "a schedule": (
        {},
        {"optimizer": Adam(keras.optimizers.schedules.CosineDecay(0.01, 50))},
        "  learning rate of Adam\n    then: 0.0",
    ),
    "the optimizer": ({}, {"optimizer": SGD(0.01)}, "optimizer is Adam with [4]"),
    "a rate of dropout": ({}, {"model": network(drop=0.5)}, "rate=0.5"),
    "an activation": ({}, {"model": network(activation="tanh")}, "activation=tanh"),
    "the graph": (
        {"model": residual(False)},
        {"model": residual(True)},
        "  model: layer 0\n    then: Functional graph ",
    ),
}


@pytest.mark.parametrize(("then", "now", "words"), REFUSED.values(), ids=REFUSED)
def test_what_decides_the_result_is_refused(tmp_path, then, now, words):
    fit(compiled(**then), tmp_path)
    with pytest.raises(CheckpointError) as caught:
        fit(compiled(**now), tmp_path, 2)
    assert words in str(caught.value)


def test_a_metric_that_keras_numbers_is_the_same_one(tmp_path):
    """Its name counts what else the process has made."""

    def counted(factor=1):
        model = compiled(metrics=[keras.metrics.MeanMetricWrapper(own_loss(factor))])
        return model, model._compile_config.config["metrics"][0].name

    (first, before), (second, now) = counted(), counted()
    assert before != now
    fit(first, tmp_path)
    fit(second, tmp_path, 2)
    with pytest.raises(CheckpointError, match=r"metrics\n    then: .*code"):
        fit(counted(2)[0], tmp_path, 3)


def test_other_arrays_and_class_weights_are_refused(tmp_path):
    fit(compiled(), tmp_path)
    with pytest.raises(DataError, match="content "):
        fit(compiled(), tmp_path, 2, source=points(1))
    with pytest.raises(DataError, match="content "):
        fit(compiled(), tmp_path, 2, class_weight={0: 1.0, 1: 2.0, 2: 3.0})


def rates(model):
    return float(model.optimizer.learning_rate.value)


def test_a_new_rate_holds_from_the_next_step(tmp_path):
    later = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.002 if epoch else rate)
    whole, rest, said = compiled(), compiled(Adam(0.002)), []
    fit(whole, None, 3, callbacks=[later])
    fit(compiled(), tmp_path)
    fit(rest, tmp_path, 3, say=said.append)
    for a, b in zip(rest.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert any("  learning rate of Adam\n    then: 0.0" in line for line in said)


def test_a_new_schedule_goes_on_at_its_step(tmp_path):
    def scheduled(steps):
        return compiled(SGD(keras.optimizers.schedules.PolynomialDecay(0.1, steps)))

    fit(scheduled(10), tmp_path)
    rest, said = scheduled(40), []
    fit(rest, tmp_path, 2, say=said.append)
    assert float(rest.optimizer._get_current_learning_rate()) == pytest.approx(
        0.1 + (0.0001 - 0.1) * 12 / 40
    )
    assert any("learning_rate.decay_steps of SGD\n    then: 10\n    now:  40" in s for s in said)


def test_a_rate_that_a_callback_had_set_stays(tmp_path):
    plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=0, min_delta=99)
    model = compiled()
    fit(model, tmp_path, 2, callbacks=[plateau])
    assert rates(model) == pytest.approx(0.005)
    rest, said = compiled(), []
    fit(rest, tmp_path, 3, say=said.append)
    assert rates(rest) == pytest.approx(0.005)
    # Keras' callbacks have no state in a checkpoint: they may come and go, and that is said.
    assert any("  Keras callbacks\n    then: ReduceLROnPlateau(" in line for line in said)
    assert not any("learning rate of" in line for line in said)
    fit(model, tmp_path, 4, say=said.append)
    assert not any("learning rate of" in line for line in said)
