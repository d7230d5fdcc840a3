"""Keras models under the Trainer: the numbers, names and files that Keras itself gives."""

from __future__ import annotations

import importlib
import random
import sys
import textwrap
import types

import numpy as np
import pytest
import torch

keras = pytest.importorskip("keras")
from keras import layers  # noqa: E402

import flatout  # noqa: E402
from flatout.errors import CheckpointError, DataError, ModelError, NumbersError  # noqa: E402
from flatout.models import as_keras_source  # noqa: E402
from flatout.train.terms import Terms  # noqa: E402

if keras.backend.backend() != "torch":
    pytest.skip("Keras is on another backend", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("one_thread")


def quiet(model, **arguments):
    return flatout.Trainer(model, say=lambda line: None, **arguments)


def points(count=96, features=5, classes=3, seed=0):
    random = np.random.default_rng(seed)
    x = random.normal(size=(count, features)).astype("float32")
    y = (x @ random.normal(size=(features, classes))).argmax(1)
    return x, y


def network(seed=0, *more):
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            layers.Input((5,)),
            layers.Dense(16, activation="relu"),
            *more,
            layers.Dense(3, activation="softmax"),
        ]
    )


def compiled(optimizer="adam", *more, metrics=("accuracy",), **options):
    model = network(0, *more)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=list(metrics), **options)
    return model


def twins(make):
    """The same model twice: one for Keras, one for us."""
    theirs, ours = make(), make()
    ours.set_weights(theirs.get_weights())
    return theirs, ours


def assert_same_weights(a, b, tolerance=2e-6):
    for left, right in zip(a.get_weights(), b.get_weights(), strict=True):
        np.testing.assert_allclose(left, right, rtol=tolerance, atol=tolerance)


def assert_same_history(ours, theirs, tolerance=2e-6):
    assert list(ours) == list(theirs)
    for name in ours:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=tolerance, atol=tolerance)


# -- the same numbers ------------------------------------------------------------------------------

SCHEDULE = keras.optimizers.schedules.ExponentialDecay
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.05),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "nesterov": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adam with a large epsilon": lambda: keras.optimizers.Adam(0.01, epsilon=1e-2),
    "amsgrad": lambda: keras.optimizers.Adam(0.01, amsgrad=True),
    "decayed adam": lambda: keras.optimizers.Adam(0.01, weight_decay=0.1),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "nadam": lambda: keras.optimizers.Nadam(0.01),
    "lion": lambda: keras.optimizers.Lion(0.003),
    "scheduled": lambda: keras.optimizers.Adam(SCHEDULE(0.02, 5, 0.7)),
    "clipnorm": lambda: keras.optimizers.Adam(0.01, clipnorm=0.05),
    "global_clipnorm": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.05),
    "clipvalue": lambda: keras.optimizers.SGD(0.1, clipvalue=0.01),
    "averaged": lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=4),
    "averaged at the end": lambda: keras.optimizers.SGD(0.1, use_ema=True),
    "accumulated": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
    "scaled": lambda: keras.optimizers.Adam(0.01, loss_scale_factor=8.0),
}


@pytest.mark.parametrize("fused", ["off", "on"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_steps_are_those_of_keras(name, fused):
    theirs, ours = twins(lambda: compiled(OPTIMIZERS[name]()))
    x, y = points()
    there = theirs.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0)
    recipe = flatout.Recipe(compute={"fused_optimizer": fused, "precision": "fp32"})
    here = quiet(ours, recipe=recipe).fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0)
    assert_same_history(here.history, there.history, 1e-5)
    assert_same_weights(ours, theirs, 1e-5)
    assert int(ours.optimizer.iterations) == int(theirs.optimizer.iterations)
    for a, b in zip(ours.optimizer.variables, theirs.optimizer.variables, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("first_scale", [2.0**15, 2.0**36])
def test_losses_are_scaled_as_keras_scales_them_in_half_precision(first_scale):
    """Gradients of this loss are 0 in float16; those of one scaled by too much are infinite."""

    def make():
        keras.utils.set_random_seed(0)
        policy = keras.DTypePolicy("mixed_float16")
        hidden = layers.Dense(16, activation="relu", dtype=policy)
        model = keras.Sequential([layers.Input((5,)), hidden, layers.Dense(3, dtype=policy)])
        optimizer = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.Adam(0.01), initial_scale=first_scale, dynamic_growth_steps=7
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, loss_weights=[1e-5])
        return model

    theirs, ours = twins(make)
    x, y = points()
    arguments = {"batch_size": 16, "epochs": 6, "shuffle": False, "verbose": 0}
    there = theirs.fit(x, y, **arguments)
    here = quiet(ours, allow="exact").fit(x, y, **arguments)
    assert_same_history(here.history, there.history, 1e-4)
    assert_same_weights(ours, theirs, 1e-4)
    assert float(ours.optimizer.dynamic_scale) == float(theirs.optimizer.dynamic_scale)
    assert int(ours.optimizer.iterations) == int(theirs.optimizer.iterations)


class Leaves(keras.callbacks.Callback):
    """Leaves gradients in the model before every batch, as another loss's backward does."""

    def on_train_batch_begin(self, batch, logs=None):
        for variable in self.model.trainable_variables:
            variable.value.grad = torch.ones_like(variable.value)


def test_gradients_that_another_loss_left_do_not_count():
    model, disturbed = twins(lambda: compiled("sgd"))
    x, y = points()
    for one, callbacks in ((model, []), (disturbed, [Leaves()])):
        trainer = quiet(one, allow="exact")
        trainer.fit(x, y, batch_size=16, epochs=1, shuffle=False, verbose=0, callbacks=callbacks)
    assert_same_weights(model, disturbed, 0)


def test_weights_that_decay_must_not_are_left_alone():
    def make():
        optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.5)
        optimizer.exclude_from_weight_decay(var_names=["bias"])
        return compiled(optimizer)

    theirs, ours = twins(make)
    x, y = points()
    theirs.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    recipe = flatout.Recipe(compute={"fused_optimizer": "on"})
    quiet(ours, recipe=recipe).fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    assert_same_weights(ours, theirs)


def test_a_constraint_holds():
    theirs, ours = twins(
        lambda: compiled("adam", layers.Dense(4, kernel_constraint=keras.constraints.MaxNorm(0.1)))
    )
    x, y = points()
    theirs.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    quiet(ours, allow="exact").fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    assert_same_weights(ours, theirs)
    assert np.linalg.norm(ours.get_weights()[2], axis=0).max() < 0.1001


def test_dropout_draws_what_keras_draws():
    theirs, ours = twins(lambda: compiled("sgd", layers.Dropout(0.5, seed=3)))
    x, y = points()
    there = theirs.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    here = quiet(ours, allow="exact").fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    assert_same_history(here.history, there.history)


def test_dropout_without_a_seed_draws_what_keras_draws_for_its_loaders_first():
    theirs, ours = twins(lambda: compiled("sgd", layers.Dropout(0.5)))
    x, y = points()
    keras.utils.set_random_seed(1)
    there = theirs.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    keras.utils.set_random_seed(1)
    for _ in range(2):  # as two DataLoaders do: a first batch builds the metrics
        torch.empty((), dtype=torch.int64).random_()
    here = quiet(ours, allow="exact").fit(x, y, batch_size=16, shuffle=False, verbose=0)
    assert_same_history(here.history, there.history)


def test_batch_normalization_keeps_keras_statistics_and_a_batch_of_one_does_no_harm():
    theirs, ours = twins(lambda: compiled("sgd", layers.BatchNormalization()))
    x, y = points(97)  # the last batch holds one sample
    theirs.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    quiet(ours, allow="exact").fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    assert_same_weights(ours, theirs)
    assert all(np.isfinite(weight).all() for weight in ours.get_weights())


def test_losses_of_layers_count():
    def make():
        regular = layers.Dense(
            8, kernel_regularizer=keras.regularizers.L2(0.1), activity_regularizer="l1"
        )
        return compiled("sgd", regular)

    theirs, ours = twins(make)
    x, y = points()
    there = theirs.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    here = quiet(ours, allow="exact").fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    assert_same_history(here.history, there.history)
    assert_same_weights(ours, theirs)


def two_by_two():
    keras.utils.set_random_seed(1)
    a, b = layers.Input((4,), name="a"), layers.Input((3,), name="b")
    joined = layers.Concatenate()([layers.Dense(6)(a), layers.Dense(6)(b)])
    outputs = {
        "kind": layers.Dense(3, name="kind", activation="softmax")(joined),
        "size": layers.Dense(1, name="size")(joined),
    }
    model = keras.Model({"a": a, "b": b}, outputs)
    model.compile(
        "adam",
        loss={"kind": "sparse_categorical_crossentropy", "size": "mse"},
        loss_weights={"kind": 1.0, "size": 0.3},
        metrics={"kind": ["accuracy"], "size": ["mae"]},
        weighted_metrics={"size": ["mse"]},
    )
    return model


def test_several_inputs_and_outputs_with_loss_weights_and_sample_weights():
    random = np.random.default_rng(0)
    x = {"a": random.normal(size=(64, 4)), "b": random.normal(size=(64, 3))}
    y = {"kind": random.integers(0, 3, 64), "size": random.normal(size=(64, 1))}
    weight = {"kind": random.random(64), "size": random.random(64)}
    theirs, ours = twins(two_by_two)
    arguments = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0}
    there = theirs.fit(x, y, sample_weight=weight, validation_data=(x, y, weight), **arguments)
    here = quiet(ours, allow="exact").fit(
        x, y, sample_weight=weight, validation_data=(x, y, weight), **arguments
    )
    # Keras lists the names in the same order, validation's after all others.
    assert_same_history(here.history, there.history)
    assert_same_weights(ours, theirs)
    predicted, expected = quiet(ours).predict(x), theirs.predict(x, verbose=0)
    assert predicted.keys() == expected.keys()
    np.testing.assert_allclose(predicted["kind"], expected["kind"], rtol=1e-5, atol=1e-6)


def test_several_inputs_in_a_list_and_tuples_of_outputs():
    def make():
        keras.utils.set_random_seed(1)
        a, b = layers.Input((4,)), layers.Input((3,))
        joined = layers.Concatenate()([a, b])
        one, two = layers.Dense(1, name="one"), layers.Dense(2, name="two")
        model = keras.Model([a, b], [one(joined), two(joined)])
        model.compile("sgd", loss=["mse", "mae"])
        return model

    random = np.random.default_rng(0)
    x = [random.normal(size=(48, 4)), random.normal(size=(48, 3))]
    y = [random.normal(size=(48, 1)), random.normal(size=(48, 2))]
    theirs, ours = twins(make)
    there = theirs.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    here = quiet(ours, allow="exact").fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    assert_same_history(here.history, there.history)
    assert [part.shape for part in quiet(ours).predict(x)] == [(48, 1), (48, 2)]


def test_classes_that_are_named_nowhere_or_are_in_no_data_weigh_as_in_keras():
    x, y = points(classes=2)  # class 2 of the network is in no data
    for weights in ({0: 4.0}, {1: 0.5, 2: 9.0}, {np.int64(1): 3.0}, {}):
        theirs, ours = twins(lambda: compiled(weighted_metrics=["accuracy"]))
        there = theirs.fit(x, y, shuffle=False, verbose=0, class_weight=weights)
        here = quiet(ours, allow="exact").fit(x, y, shuffle=False, verbose=0, class_weight=weights)
        assert_same_history(here.history, there.history)


@pytest.mark.parametrize("kind", ["Arrays", "arrays"])
def test_class_weight_holds_for_our_own_sources(kind):
    x, y = points()
    weights = {0: 5.0, 2: 0.1}
    theirs, ours = twins(lambda: compiled(weighted_metrics=["accuracy"]))
    there = theirs.fit(x, y, batch_size=32, shuffle=False, verbose=0, class_weight=weights)
    source = getattr(flatout.data, kind)(x, y)
    data = {"batch_size": 32, "shuffle": False} if kind == "Arrays" else {}
    source = source.batch(32) if kind == "arrays" else source
    here = quiet(ours, allow="exact").fit(source, verbose=0, class_weight=weights, **data)
    assert_same_history(here.history, there.history)
    with pytest.raises(DataError, match="which holds its own"):
        quiet(ours).fit(source, verbose=0, sample_weight=np.ones(96))


@pytest.mark.parametrize(
    ("weights", "words"),
    [([1.0, 2.0], "found a list"), ({"0": 2.0}, "found {'0': 2.0}"), ({0.5: 1.0}, "found {0.5")],
)
def test_class_weights_that_are_none(weights, words):
    x, y = points()
    with pytest.raises(ModelError, match="class_weight maps class numbers to weights") as caught:
        quiet(compiled()).fit(x, y, class_weight=weights)
    assert words in caught.value.what


def test_class_weight_of_several_outputs_is_refused():
    inputs = layers.Input((5,))
    model = keras.Model(inputs, [layers.Dense(1)(inputs), layers.Dense(1)(inputs)])
    model.compile("sgd", "mse")
    x, y = points()
    with pytest.raises(ModelError, match="class_weight needs a model of a single output"):
        quiet(model).fit(x, [y, y], class_weight={0: 2.0})


def test_a_pydataset_comes_in_another_order_in_each_epoch():
    class Numbered(Batches):
        def __init__(self, *arrays):
            super().__init__(*arrays)
            self.asked = []

        def __getitem__(self, index):
            self.asked.append(index)
            return super().__getitem__(index)

    batches = Numbered(*points(count=320))
    quiet(compiled(), allow="exact").fit(batches, epochs=3, verbose=0)
    size = len(batches)
    epochs = [batches.asked[len(batches.asked) - (n + 1) * size :][:size] for n in range(3)]
    assert all(sorted(order) == list(range(size)) for order in epochs)
    assert len({tuple(order) for order in epochs}) == 3


def test_what_a_model_does_not_take_is_told_with_its_first_layer():
    x, y = points()
    with pytest.raises(DataError, match="Target -1 is out of bounds") as caught:
        quiet(compiled()).fit(x, y - 1)
    assert "first layer dense" in caught.value.where
    assert "is Dense with weights (5, 16)" in caught.value.where


def test_reading_a_pydataset_in_its_order_draws_nothing():
    # So a thread may read it ahead.
    source = as_keras_source(Batches(*points()))
    before = torch.get_rng_state(), random.getstate()
    assert len(source.peek(2)) == 2
    assert len(list(source.batches(0))) == len(list(source.batches(1))) == source.steps
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_sample_weight_class_weight_and_validation_split():
    x, y = points(100)
    weight = np.linspace(0, 2, 100)
    arguments = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0}
    for more in (
        {"sample_weight": weight},
        {"class_weight": {0: 1.0, 1: 3.0, 2: 0.2}},
        {"validation_split": 0.25},
        {"sample_weight": weight, "validation_split": 0.3},
    ):
        theirs, ours = twins(lambda: compiled("sgd"))
        there = theirs.fit(x, y, **arguments, **more)
        here = quiet(ours, allow="exact").fit(x, y, **arguments, **more)
        assert_same_history(here.history, there.history)
        assert_same_weights(ours, theirs)


def test_masks_reach_loss_and_metrics():
    def make():
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [
                layers.Input((6,), dtype="int32"),
                layers.Embedding(9, 4, mask_zero=True),
                layers.LSTM(5, return_sequences=True),
                layers.Dense(3, activation="softmax"),
            ]
        )
        model.compile("adam", "sparse_categorical_crossentropy", weighted_metrics=["accuracy"])
        return model

    random = np.random.default_rng(0)
    x = random.integers(1, 9, (40, 6)) * (np.arange(6) < random.integers(1, 7, (40, 1)))
    y = random.integers(0, 3, (40, 6))
    theirs, ours = twins(make)
    there = theirs.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    here = quiet(ours, allow="exact").fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    assert_same_history(here.history, there.history)
    assert_same_weights(ours, theirs)


def test_a_stateful_layer_goes_on_from_its_state():
    def make():
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [
                layers.Input((4, 2), batch_size=8),
                layers.SimpleRNN(3, stateful=True),
                layers.Dense(1),
            ]
        )
        model.compile("sgd", "mse")
        return model

    random = np.random.default_rng(0)
    x, y = random.normal(size=(32, 4, 2)), random.normal(size=(32, 1))
    theirs, ours = twins(make)
    there = theirs.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    here = quiet(ours).fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    assert_same_history(here.history, there.history, 1e-5)


def test_a_precision_policy_of_the_user_is_honored():
    def make():
        keras.utils.set_random_seed(0)
        policy = "mixed_bfloat16"
        model = keras.Sequential(
            [layers.Input((5,)), layers.Dense(16, "relu", dtype=policy), layers.Dense(3)]
        )
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    theirs, ours = twins(make)
    x, y = points()
    there = theirs.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    here = quiet(ours, allow="exact").fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    assert_same_history(here.history, there.history)


def test_a_loss_and_metrics_of_the_users_own_are_called():
    class Own(keras.Sequential):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return keras.ops.mean((y_pred[:, 0] - x[:, 0]) ** 2)

        def compute_metrics(self, x, y, y_pred, sample_weight=None):
            return {**super().compute_metrics(x, y, y_pred, sample_weight), "seven": 7.0}

    def make():
        keras.utils.set_random_seed(0)
        model = Own([layers.Input((5,)), layers.Dense(3)])
        model.compile("sgd")
        return model

    theirs, ours = twins(make)
    x, y = points()
    there = theirs.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    here = quiet(ours, allow="exact").fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    assert_same_history(here.history, there.history)
    assert here.history["seven"] == [7.0, 7.0]


def test_a_train_step_of_the_users_own_runs_as_written_and_that_is_said():
    seen, said = [], []

    class Own(keras.Sequential):
        def train_step(self, data):
            seen.append(len(data[0]))
            return super().train_step(data)

    model = Own([layers.Input((5,)), layers.Dense(3)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = points(40)
    history = flatout.Trainer(model, say=said.append).fit(x, y, batch_size=16, epochs=2, verbose=0)
    assert sorted(seen) == [8, 8, 16, 16, 16, 16]
    assert len(history.history["loss"]) == 2
    assert "Own has its own train_step: it runs as written" in said[0]


@pytest.mark.parametrize("place", ["training", "validation"])
def test_sources_of_flatout_do_not_go_through_keras_own_loop(place):
    class Own(keras.Sequential):
        def train_step(self, data):
            return super().train_step(data)

    class AsAdvised(keras.Sequential):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return super().compute_loss(x, y, y_pred, sample_weight, training)

    pipeline = flatout.data.arrays(*points(32)).batch(16)
    data = [pipeline, points(32)] if place == "training" else [points(32), pipeline]

    def fitted(kind):
        model = kind([layers.Input((5,)), layers.Dense(3)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        train = (data[0],) if place == "training" else data[0]
        return quiet(model).fit(*train, validation_data=data[1], verbose=0)

    with pytest.raises(DataError, match="own train_step, so Keras' own loop reads") as caught:
        fitted(Own)
    assert "override compute_loss" in caught.value.do
    assert len(fitted(AsAdvised).history["val_loss"]) == 1


def test_auto_leaves_no_trace_in_model_optimizer_and_metrics():
    model = compiled("adam", layers.BatchNormalization(), layers.Dropout(0.3, seed=1))
    twin = compiled("adam", layers.BatchNormalization(), layers.Dropout(0.3, seed=1))
    twin.set_weights(model.get_weights())
    x, y = points(640)
    arguments = {"batch_size": 32, "epochs": 3, "shuffle": False, "verbose": 0}
    plain = flatout.Recipe(
        compute={"precision": "fp32", "fused_optimizer": "on", "rewrites": "off"},
        memory={"allocator": "default"},
    )
    here = quiet(model, recipe=flatout.Recipe(compute={"precision": "fp32"})).fit(x, y, **arguments)
    there = quiet(twin, recipe=plain).fit(x, y, **arguments)
    assert_same_history(here.history, there.history, 1e-5)


# -- what fit takes --------------------------------------------------------------------------------


class Batches(keras.utils.PyDataset):
    def __init__(self, x, y):
        super().__init__()
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x) // 16

    def __getitem__(self, number):
        part = slice(16 * number, 16 * (number + 1))
        return self.x[part], self.y[part]


def forever(x, y):
    while True:
        for start in range(0, len(x), 16):
            yield x[start : start + 16], y[start : start + 16]


def loader(x, y):
    data = torch.utils.data.TensorDataset(torch.as_tensor(x), torch.as_tensor(y))
    return torch.utils.data.DataLoader(data, batch_size=16)


KINDS = {
    "arrays": lambda x, y: {"x": x, "y": y, "batch_size": 16},
    "float64": lambda x, y: {"x": x.astype("float64"), "y": y, "batch_size": 16},
    "tensors": lambda x, y: {"x": torch.as_tensor(x), "y": torch.as_tensor(y), "batch_size": 16},
    "PyDataset": lambda x, y: {"x": Batches(x, y)},
    "DataLoader": lambda x, y: {"x": loader(x, y)},
    "generator": lambda x, y: {"x": forever(x, y), "steps_per_epoch": 6},
}


@pytest.mark.parametrize("kind", KINDS)
def test_all_that_fit_takes_gives_the_same(kind):
    x, y = points(96)
    theirs, ours = twins(lambda: compiled("sgd"))
    there = theirs.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    here = quiet(ours, allow="exact").fit(**KINDS[kind](x, y), epochs=2, shuffle=False, verbose=0)
    assert_same_history(here.history, there.history)
    assert here.timeline.steps == 12


def test_a_pipeline_of_fewer_samples_than_a_batch_is_one_batch():
    x, y = points(20)
    made = flatout.data.arrays(x, y).batch(32)
    ours = quiet(compiled())
    assert len(ours.fit(made, validation_data=made, epochs=1).history["val_loss"]) == 1
    assert ours.evaluate(made) == ours.evaluate(x, y, batch_size=32)


def test_validation_of_any_kind_and_only_now_and_then():
    x, y = points(96)
    model = compiled("sgd")
    history = quiet(model).fit(
        x, y, epochs=5, validation_data=Batches(x, y), validation_freq=2, verbose=0
    )
    assert len(history.history["loss"]) == 5
    assert len(history.history["val_loss"]) == 2


def test_an_unbuilt_model_is_built_from_the_first_batch():
    model = keras.Sequential([layers.Dense(4), layers.Dense(3)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = points()
    quiet(model).fit(x, y, verbose=0)
    assert model.built
    assert [weight.shape for weight in model.get_weights()] == [(5, 4), (4,), (4, 3), (3,)]


# -- callbacks -------------------------------------------------------------------------------------


def fit_with(callbacks, model=None, epochs=4, **more):
    model = compiled("sgd") if model is None else model
    x, y = points()
    arguments = {"batch_size": 16, "shuffle": False, "verbose": 0, **more}
    return quiet(model).fit(x, y, epochs=epochs, callbacks=callbacks, **arguments), model


def test_early_stopping_stops_and_restores_the_best_weights():
    class Worse(keras.callbacks.Callback):
        """The figures get worse from the second epoch on, and the weights are spoiled."""

        def on_epoch_end(self, epoch, logs=None):
            logs["loss"] = [1.0, 0.5, 0.7, 0.8, 0.9][epoch]
            if epoch == 1:
                self.best = self.model.get_weights()

    worse = Worse()
    stop = keras.callbacks.EarlyStopping("loss", patience=2, restore_best_weights=True)
    history, model = fit_with([worse, stop], epochs=5)
    assert history.history["loss"] == [1.0, 0.5, 0.7, 0.8]
    assert stop.stopped_epoch == 3
    assert "stop_training" in history.stop_reason
    for now, best in zip(model.get_weights(), worse.best, strict=True):
        np.testing.assert_array_equal(now, best)


def test_model_checkpoint_writes_what_keras_alone_loads(tmp_path):
    path = str(tmp_path / "at-{epoch}.keras")
    _, model = fit_with(keras.callbacks.ModelCheckpoint(path), epochs=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["at-1.keras", "at-2.keras"]
    loaded = keras.saving.load_model(tmp_path / "at-2.keras")
    for a, b in zip(loaded.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    x, _ = points()
    np.testing.assert_allclose(
        loaded.predict(x, verbose=0), quiet(model).predict(x), rtol=1e-5, atol=1e-6
    )


def test_model_checkpoint_by_batches(tmp_path):
    path = str(tmp_path / "{epoch}-{batch}.weights.h5")
    callback = keras.callbacks.ModelCheckpoint(path, save_freq=4, save_weights_only=True)
    fit_with(callback, epochs=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "1-4.weights.h5", "2-2.weights.h5", "2-6.weights.h5",
    ]  # fmt: skip


def test_reduce_on_plateau_lowers_the_rate_that_steps_use():
    class Flat(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["loss"] = 1.0

    plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.0, patience=1, min_lr=0.0)

    seen = []
    weights = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append(model.get_weights()[0])
    )
    model = compiled("sgd")
    history, _ = fit_with([Flat(), plateau, weights], model, epochs=4)
    assert float(model.optimizer.learning_rate) == 0
    assert history.history["learning_rate"][0] > 0
    np.testing.assert_array_equal(seen[-1], seen[-2])


@pytest.mark.parametrize("fused", ["off", "on"])
def test_a_learning_rate_schedule_by_epoch_is_followed(fused):
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.1 / (1 + epoch))
    theirs, ours = twins(lambda: compiled("adam"))
    x, y = points()
    there = theirs.fit(
        x, y, batch_size=16, epochs=3, shuffle=False, verbose=0, callbacks=[schedule]
    )
    recipe = flatout.Recipe(compute={"fused_optimizer": fused, "precision": "fp32"})
    here = quiet(ours, recipe=recipe).fit(
        x, y, batch_size=16, epochs=3, shuffle=False, verbose=0, callbacks=[schedule]
    )
    assert_same_history(here.history, there.history, 1e-4)
    assert here.history["learning_rate"] == pytest.approx([0.1, 0.05, 0.1 / 3])


def test_csv_logger_writes_a_line_an_epoch(tmp_path):
    history, _ = fit_with([keras.callbacks.CSVLogger(tmp_path / "log.csv")], epochs=3)
    lines = (tmp_path / "log.csv").read_text().splitlines()
    assert lines[0].startswith("epoch,accuracy,loss")
    assert [line.split(",")[0] for line in lines[1:]] == ["0", "1", "2"]
    assert float(lines[3].split(",")[2]) == pytest.approx(history.history["loss"][2])


def test_backup_and_restore_goes_on_after_an_interruption(tmp_path):
    class Fails(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyError("the power went")

    x, y = points()
    undisturbed, model = twins(lambda: compiled("adam"))
    there = quiet(undisturbed, allow="exact").fit(x, y, epochs=4, shuffle=False, verbose=0)
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    with pytest.raises(KeyError):
        quiet(model, allow="exact").fit(
            x, y, epochs=4, shuffle=False, verbose=0, callbacks=[backup, Fails()]
        )
    again = compiled("adam")
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    history = quiet(again, allow="exact").fit(
        x, y, epochs=4, shuffle=False, verbose=0, callbacks=[backup]
    )
    assert history.history["loss"] == pytest.approx(there.history["loss"][2:])
    assert_same_weights(again, undisturbed)


def test_every_event_comes_in_keras_order_with_keras_logs():
    class Log(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.events = []

        def __getattribute__(self, name):
            if not name.startswith("on_"):
                return super().__getattribute__(name)
            events = self.events

            def event(*args, **kwargs):
                logs = next((a for a in args if isinstance(a, dict)), kwargs.get("logs")) or {}
                number = next((a for a in args if isinstance(a, int)), None)
                events.append((name, number, sorted(logs)))

            return event

    x, y = points(40)
    theirs, ours = Log(), Log()
    arguments = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0}
    compiled("sgd").fit(x, y, validation_data=(x, y), callbacks=[theirs], **arguments)
    quiet(compiled("sgd")).fit(x, y, validation_data=(x, y), callbacks=[ours], **arguments)
    mine = [e[:2] for e in ours.events]
    assert mine == [e[:2] for e in theirs.events]
    ends = ("on_epoch_end", "on_train_batch_end", "on_train_end")
    assert [e for e in ours.events if e[0] in ends] == [e for e in theirs.events if e[0] in ends]


def test_logs_of_a_batch_are_read_only_where_somebody_looks(monkeypatch):
    from flatout.train.loop import Loop

    reads = []
    monkeypatch.setattr(Loop, "mean_loss", lambda self: reads.append(1) or 0.5)

    class Blind(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            pass

    class Sees(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            assert logs.get("loss") == 0.5
            assert set(logs) == {"loss", "accuracy"}

    fit_with([Blind()], epochs=1)
    assert len(reads) == 1  # at the end of the epoch
    fit_with([Sees()], epochs=1)
    assert len(reads) == 1 + 1 + 6


def test_callbacks_of_both_kinds_go_together():
    steps = []

    class Ours(flatout.Callback):
        def on_step(self, state):
            steps.append(state.learning_rate)

    stop = keras.callbacks.EarlyStopping("loss", patience=9)
    fit_with([Ours(), stop], compiled(keras.optimizers.SGD(0.25)), epochs=1)
    assert steps == [0.25] * 6
    with pytest.raises(ModelError, match="a callback is"):
        fit_with([print])


# -- evaluate, predict, files, resume --------------------------------------------------------------


def test_evaluate_and_predict_are_those_of_keras():
    x, y = points()
    model = compiled("adam", layers.BatchNormalization(), layers.Dropout(0.5))
    trainer = quiet(model, allow="exact")
    trainer.fit(x, y, epochs=2, verbose=0)
    expected = model.evaluate(x, y, verbose=0, return_dict=True)
    assert trainer.evaluate(x, y) == pytest.approx(expected, rel=1e-5)
    predicted = trainer.predict(x)
    assert isinstance(predicted, np.ndarray)
    np.testing.assert_allclose(predicted, model.predict(x, verbose=0), rtol=1e-5, atol=1e-6)


def test_what_fills_a_batch_up_counts_in_no_loss_and_no_metric():
    x, y = points(51)
    kept, padded = (flatout.data.arrays(x, y).batch(16, last=last) for last in ("keep", "pad"))
    plain, other = (quiet(compiled(weighted_metrics=["accuracy"])) for _ in range(2))
    expected = plain.fit(kept, epochs=2, verbose=0).history
    assert_same_history(other.fit(padded, epochs=2, verbose=0).history, expected)
    assert_same_weights(other.model, plain.model)
    found = other.evaluate(padded)
    assert found == pytest.approx(plain.evaluate(kept), rel=1e-5)
    assert len(other.predict(padded)) == 51


@pytest.mark.parametrize("name", ["model.keras", "model.weights.h5", "model.safetensors"])
def test_files_come_and_go(name, tmp_path):
    x, y = points()
    trained, fresh = compiled("adam"), compiled("adam")
    trainer = quiet(trained)
    trainer.fit(x, y, epochs=2, verbose=0)
    assert trainer.save(tmp_path / name) == tmp_path / name
    other = quiet(fresh)
    other.load(tmp_path / name)
    for a, b in zip(fresh.get_weights(), trained.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_whole_keras_file_holds_optimizer_and_compiled_state(tmp_path):
    x, y = points()
    model = compiled("adam")
    trainer = quiet(model)
    trainer.fit(x, y, epochs=2, verbose=0)
    trainer.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert int(loaded.optimizer.iterations) == int(model.optimizer.iterations) == 6
    np.testing.assert_array_equal(
        loaded.optimizer.variables[2].numpy(), model.optimizer.variables[2].numpy()
    )
    assert [path.name for path in tmp_path.iterdir()] == ["model.keras"]


def test_bad_files_are_refused_and_the_weights_stay(tmp_path):
    model = compiled("adam")
    before = model.get_weights()
    trainer = quiet(model)
    (tmp_path / "bad.keras").write_bytes(b"no zip at all")
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        trainer.load(tmp_path / "bad.keras")
    with pytest.raises(CheckpointError, match="endings"):
        trainer.save(tmp_path / "model.pt")
    other = keras.Sequential([layers.Input((5,)), layers.Dense(2)])
    other.compile("sgd", "mse")
    quiet(other).save(tmp_path / "other.weights.h5")
    with pytest.raises(CheckpointError):
        trainer.load(tmp_path / "other.weights.h5")
    for a, b in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("allow", ["exact", "tolerant"])
def test_a_resume_in_the_middle_of_an_epoch_is_bitwise(allow, tmp_path):
    def make():
        return compiled("adam", layers.BatchNormalization(), layers.Dropout(0.4, seed=2))

    class Stops(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.steps = getattr(self, "steps", 0) + 1
            if self.steps == 9:
                raise KeyError("the power went")

    x, y = points()
    recipe = flatout.Recipe(save={"every": 4}, compute={"precision": "fp32"})
    arguments = {"batch_size": 16, "epochs": 3, "verbose": 0}
    undisturbed = make()
    there = quiet(undisturbed, recipe=recipe, allow=allow, run=tmp_path / "a").fit(
        x, y, **arguments
    )
    disturbed = make()
    with pytest.raises(KeyError):
        quiet(disturbed, recipe=recipe, allow=allow, run=tmp_path / "b").fit(
            x, y, callbacks=[Stops()], **arguments
        )
    again = make()
    here = quiet(again, recipe=recipe, allow=allow, run=tmp_path / "b").fit(
        x, y, resume=True, **arguments
    )
    assert here.history == there.history
    for a, b in zip(again.get_weights(), undisturbed.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(again.optimizer.variables, undisturbed.optimizer.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


class Counts(keras.callbacks.Callback):
    """A callback that keeps its own state."""

    def __init__(self):
        super().__init__()
        self.epochs = []

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(epoch)

    def state_dict(self):
        return {"epochs": self.epochs}

    def load_state_dict(self, state):
        self.epochs = list(state["epochs"])


@pytest.mark.parametrize("checkpoint", ["step-000000009", "step-000000015"])
def test_callbacks_go_on_counting_after_a_resume(checkpoint, tmp_path):
    """Resume in the middle of the second epoch, and at the start of the third one."""
    x, y = points()

    def fitted(resume=False):
        callbacks = [
            keras.callbacks.ReduceLROnPlateau("loss", factor=0.3, patience=1, min_delta=50.0),
            keras.callbacks.EarlyStopping(
                "loss", patience=3, min_delta=50.0, restore_best_weights=True
            ),
            keras.callbacks.EarlyStopping("loss", patience=99),
            Counts(),
        ]
        model = compiled(keras.optimizers.SGD(0.1))
        recipe = flatout.Recipe(save={"every": 1, "keep_last": 50})
        trainer = quiet(model, run=tmp_path / "run", allow="exact", recipe=recipe)
        history = trainer.fit(
            x, y, batch_size=16, epochs=9, verbose=0, callbacks=callbacks, resume=resume
        )
        return history.history, model, callbacks

    unbroken, model, callbacks = fitted()
    assert len(unbroken["loss"]) == 4
    resumed, again, later = fitted(checkpoint)
    assert resumed == unbroken
    assert_same_weights(again, model, 0)
    assert later[3].epochs == callbacks[3].epochs
    for ours, theirs in zip(later[:3], callbacks[:3], strict=True):
        names = ("best", "wait", "best_epoch", "stopped_epoch", "cooldown_counter")
        kept = [{n: v for n, v in vars(c).items() if n in names} for c in (ours, theirs)]
        assert kept[0] == kept[1]


# -- what is refused -------------------------------------------------------------------------------


def logits(*more):
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [layers.Input((5,)), layers.Dense(16, activation="relu"), *more, layers.Dense(3)]
    )


def test_a_model_that_is_not_compiled_takes_the_trainers_arguments(tmp_path):
    """Against the same loop by hand, dropout and BatchNormalization included."""
    x, y = points()

    def make():
        return logits(layers.BatchNormalization(), layers.Dropout(0.3, seed=1))

    theirs, ours = twins(make)
    optimizer = torch.optim.AdamW([v.value for v in theirs.trainable_variables], lr=0.01)
    for start in range(0, 96, 16):
        output = theirs(x[start : start + 16], training=True)
        loss = torch.nn.functional.cross_entropy(output, torch.as_tensor(y[start : start + 16]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    trainer = quiet(ours, optimizer="adamw", lr=0.01, metrics=["accuracy"], allow="exact")
    history = trainer.fit(x, y, batch_size=16, shuffle=False, progress=False)
    assert_same_weights(ours, theirs)
    assert set(history.history) == {"loss", "accuracy", "seconds"}
    figures = trainer.evaluate(x, y)
    assert figures["accuracy"] == pytest.approx(
        (theirs.predict(x, verbose=0).argmax(1) == y).mean()
    )
    torch.testing.assert_close(
        trainer.predict(x), torch.as_tensor(theirs.predict(x, verbose=0)), rtol=1e-5, atol=1e-5
    )
    trainer.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.get_weights()[0], ours.get_weights()[0])
    fresh = quiet(make())
    fresh.load(tmp_path / "model.keras")
    np.testing.assert_array_equal(fresh.model.get_weights()[0], ours.get_weights()[0])


def test_several_inputs_without_compile():
    keras.utils.set_random_seed(0)
    a, b = layers.Input((4,), name="a"), layers.Input((3,), name="b")
    model = keras.Model({"a": a, "b": b}, layers.Dense(1)(layers.Concatenate()([a, b])))
    random = np.random.default_rng(0)
    x = {"a": random.normal(size=(64, 4)), "b": random.normal(size=(64, 3))}
    x = {name: part.astype("float32") for name, part in x.items()}
    y = (x["a"].sum(1, keepdims=True) - x["b"].sum(1, keepdims=True)).astype("float32")
    trainer = quiet(model, loss="mse", lr=0.1)
    trainer.fit((x, y), epochs=60, progress=False)
    assert trainer.evaluate((x, y))["loss"] < 0.1
    assert trainer.predict(x).shape == (64, 1)


def test_a_model_without_weights_and_compile_is_refused():
    with pytest.raises(ModelError, match="not built"):
        flatout.Trainer(keras.Sequential([layers.Dense(3)]), loss="mse")


def test_what_was_compiled_is_not_given_again():
    with pytest.raises(ModelError, match="loss, lr given for a Keras model"):
        flatout.Trainer(compiled(), loss="mse", lr=0.1)


def test_a_layer_of_another_framework_is_named_with_its_line(tmp_path, monkeypatch):
    jax = types.ModuleType("jax")
    jax.nn = types.SimpleNamespace(relu=lambda x: x)
    monkeypatch.setitem(sys.modules, "jax", jax)
    code = tmp_path / "own_layer.py"
    code.write_text(
        textwrap.dedent(
            """\
            import jax
            import keras

            class Own(keras.layers.Layer):
                def call(self, x):
                    y = x + 1
                    return jax.nn.relu(y)
            """
        )
    )
    monkeypatch.syspath_prepend(tmp_path)
    own_layer = importlib.import_module("own_layer")
    model = network(0, own_layer.Own(name="mine"))
    model.compile("sgd", "mse")
    with pytest.raises(ModelError) as error:
        flatout.Trainer(model)
    assert "layer 'mine' (Own) calls jax.nn.relu of JAX" in str(error.value)
    assert f"{code}:7" in str(error.value)


def test_another_backend_is_explained(monkeypatch):
    model = compiled()
    monkeypatch.setattr(keras.backend, "backend", lambda: "tensorflow")
    with pytest.raises(ModelError, match="Keras runs on tensorflow in this process") as error:
        flatout.Trainer(model)
    assert "KERAS_BACKEND=torch" in str(error.value)


def test_a_nan_is_held_back_and_explained():
    x, y = points()
    x[40, 2] = np.nan
    model = compiled("sgd")
    with pytest.raises(NumbersError) as error:
        quiet(model).fit(x, y, batch_size=16, shuffle=False, verbose=0)
    assert "sample 40" in str(error.value)
    assert all(np.isfinite(weight).all() for weight in model.get_weights())


@keras.saving.register_keras_serializable()
class Logarithm(layers.Layer):
    def call(self, x):
        return keras.ops.log(x)


@pytest.mark.parametrize("rewrites", ["on", "off"])
def test_the_layer_that_makes_a_nan_is_named(rewrites):
    x, y = points()
    model = compiled("sgd", Logarithm(name="log"))
    recipe = flatout.Recipe(compute={"rewrites": rewrites})
    with pytest.raises(NumbersError, match=r"first bad value: output of module log \(Logarithm\)"):
        quiet(model, recipe=recipe).fit(x, y, batch_size=16, verbose=0)
    assert not any("call" in vars(layer) for layer in model.layers)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"x": None}, "x is None"),
        ({"x": "file.npy"}, "as data"),
        ({"validation_split": 1.5}, "validation_split=1.5"),
        ({"class_weight": {0: 1.0, 1: 1.0, 2: 1.0}, "sample_weight": np.ones(96)}, "same time"),
    ],
)
def test_bad_data_are_named(arguments, words):
    x, y = points()
    with pytest.raises(DataError, match=words):
        quiet(compiled()).fit(**{"x": x, "y": y, "verbose": 0, **arguments})


# -- slow metrics ----------------------------------------------------------------------------------


class Own(keras.metrics.SparseCategoricalCrossentropy):
    pass


def test_a_metric_slower_than_the_step_is_named_and_fed_less_often(monkeypatch):
    updates = []
    real = keras.metrics.MeanIoU.update_state

    def counted(self, y_true, y_pred, sample_weight=None):
        updates.append(len(y_true))
        return real(self, y_true, y_pred, sample_weight)

    monkeypatch.setattr(keras.metrics.MeanIoU, "update_state", counted)
    x, y = points(320)
    ours, theirs = twins(
        lambda: compiled(
            "sgd",
            metrics=[
                "accuracy",
                keras.metrics.MeanIoU(3, sparse_y_pred=False, name="iou"),
                Own(name="own"),
            ],
        )
    )
    arguments = {"batch_size": 16, "epochs": 3, "shuffle": False, "verbose": 0}
    arguments["validation_data"] = (x[:100], y[:100])
    there = theirs.fit(x, y, **arguments)
    updates.clear()
    said = []
    trainer = flatout.Trainer(ours, allow="exact", say=said.append)
    trainer.terms = Terms(slow_share=0.0)  # a metric that takes any time is slow
    here = trainer.fit(x, y, **arguments)
    assert_same_history(here.history, there.history, 1e-5)
    assert any(line.startswith("metric iou takes") and "at once" in line for line in said)
    assert any(line.startswith("metric own takes") and "your own" in line for line in said)
    # In the second and third epoch one update for training and one for validation each.
    assert updates[-4:] == [320, 100, 320, 100]
    assert not any("update_state" in vars(metric) for metric in ours.metrics)
    assert trainer.evaluate(x, y)["iou"] == pytest.approx(
        theirs.evaluate(x, y, verbose=0, return_dict=True)["iou"]
    )


def test_metrics_that_are_not_slow_stay_in_the_step():
    said = []
    model = compiled("sgd")
    x, y = points(320)
    flatout.Trainer(model, say=said.append, allow="exact").fit(x, y, epochs=2, verbose=0)
    assert not any(line.startswith("metric") for line in said)


def test_values_kept_for_a_slow_metric_are_bounded():
    x, y = points(320)
    ours, theirs = twins(lambda: compiled("sgd"))
    there = theirs.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    trainer = quiet(ours, allow="exact")
    trainer.terms = Terms(slow_share=0.0, slow_bytes=16 * (8 + 12))  # one batch
    here = trainer.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    assert_same_history(here.history, there.history, 1e-5)


# -- with TensorFlow -------------------------------------------------------------------------------


@pytest.mark.slow
def test_keras_tensorboard_writes_its_events(tmp_path):
    """Keras' own callback writes through TensorFlow."""
    pytest.importorskip("tensorflow")
    board = keras.callbacks.TensorBoard(tmp_path, update_freq=2, write_graph=False)
    fit_with([board], epochs=2, validation_split=0.25)
    written = {path.parent.name: path.stat().st_size for path in tmp_path.rglob("events*")}
    assert set(written) == {"train", "validation"}
    assert min(written.values()) > 100


@pytest.mark.slow
def test_a_tf_data_set_gives_the_same_as_arrays():
    tf = pytest.importorskip("tensorflow")
    x, y = points(96)
    ours, theirs = twins(lambda: compiled("sgd"))
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
    here = quiet(ours, allow="exact").fit(data, epochs=2, validation_data=data, verbose=0)
    there = theirs.fit(
        x, y, batch_size=16, epochs=2, shuffle=False, validation_data=(x, y), verbose=0
    )
    assert_same_history(here.history, there.history)


def test_blended_samples_are_for_a_loss_that_takes_shares():
    images = np.random.default_rng(0).random((48, 4, 4, 3), np.float32)
    labels = np.arange(48) % 3
    blended = flatout.data.arrays(images, labels).batch(16).mixup(0.2, classes=3)
    given = {"validation_data": flatout.data.arrays(images, labels).batch(16), "progress": False}

    def compiled(loss, metric="accuracy"):
        dense = layers.Dense(3, activation="softmax")
        model = keras.Sequential([keras.Input((4, 4, 3)), layers.Flatten(), dense])
        model.compile("sgd", loss, metrics=[metric])
        return model

    for metric, instead in (
        ("sparse_categorical_accuracy", "'categorical_accuracy'"),
        (keras.metrics.SparseTopKCategoricalAccuracy(2), "'TopKCategoricalAccuracy'"),
    ):
        with pytest.raises(ModelError, match=f"(?si)the metric sparse.*{instead}"):
            quiet(compiled("categorical_crossentropy", metric)).fit(blended, epochs=1, **given)
    with pytest.raises(ModelError, match="takes class numbers, and the targets are shares"):
        quiet(compiled("sparse_categorical_crossentropy")).fit(blended, epochs=1, **given)
    for loss in ("categorical_crossentropy", keras.losses.CategoricalCrossentropy()):
        model = compiled(loss)
        history = quiet(model).fit(blended, epochs=2, **given)
        loss, accuracy = model.evaluate(images, np.eye(3, dtype=np.float32)[labels], verbose=0)
        last = history.epochs[-1]
        assert last["val_loss"] == pytest.approx(loss, rel=1e-5)
        assert last["val_accuracy"] == pytest.approx(accuracy)
