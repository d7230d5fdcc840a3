"""Frozen Keras layers."""

from __future__ import annotations

import numpy as np
import pytest

import flatout
from flatout.errors import ModelError
from flatout.optim import KerasOptimizer

keras = pytest.importorskip("keras")


def nested():  # type: ignore[no-untyped-def]
    layers = [
        keras.layers.Dense(8, name="a"),
        keras.layers.BatchNormalization(name="n"),
        keras.layers.Dropout(0.5, name="d"),
        keras.layers.Dense(8, name="b"),
    ]
    inner = keras.Sequential([keras.Input((8,)), *layers], name="inner")
    inputs = keras.Input((8,))
    x = keras.layers.GaussianNoise(0.1, name="noise")(inputs)
    x = inner(x)
    x = keras.layers.Dropout(0.5, name="drop")(x)
    return keras.Model(inputs, keras.layers.Dense(2, name="head")(x))


def trains(model) -> set[str]:  # type: ignore[no-untyped-def]
    leaves = (one for one in model._flatten_layers() if not list(one._layers))
    return {one.name for one in leaves if one.trainable_variables}


def test_layers_are_frozen_until_one_within_a_model() -> None:
    model = flatout.freeze(nested(), until="d")
    assert trains(model) == {"b", "head"}
    x = np.ones((4, 8), "float32")
    inner = model.get_layer("inner")
    front = keras.Model(inner.inputs, inner.get_layer("d").output)
    before = front.get_weights()
    a, b = (keras.ops.convert_to_numpy(front(x, training=True)) for _ in range(2))
    assert (a == b).all()
    assert all((a == b).all() for a, b in zip(front.get_weights(), before, strict=True))
    outputs = [keras.ops.convert_to_numpy(model(x, training=True)) for _ in range(2)]
    assert (outputs[0] != outputs[1]).any()  # `drop` behind it still acts


def test_a_frozen_model_within_a_model_thaws_in_part() -> None:
    model = nested()
    model.get_layer("inner").trainable = False
    flatout.unfreeze(model, layers=["b", "n"])
    assert trains(model) == {"b", "head"}
    flatout.unfreeze(model, layers="n", batch_norm=True)
    assert trains(model) == {"b", "n", "head"}


def test_dropout_acts_again_when_unfrozen() -> None:
    model = flatout.unfreeze(flatout.freeze(nested()))
    x = np.ones((4, 8), "float32")
    outputs = [keras.ops.convert_to_numpy(model(x, training=True)) for _ in range(2)]
    assert (outputs[0] != outputs[1]).any()
    assert trains(model) == {"a", "b", "head"}  # but for BatchNormalization


def test_augmentation_goes_on() -> None:
    model = keras.Sequential(
        [keras.Input((8, 8, 3)), keras.layers.RandomFlip(), keras.layers.Conv2D(2, 3, name="conv")]
    )
    flatout.freeze(model, until="conv")
    x = np.random.default_rng(0).random((16, 8, 8, 3), dtype="float32")
    outputs = [keras.ops.convert_to_numpy(model(x, training=True)) for _ in range(2)]
    assert (outputs[0] != outputs[1]).any()


def test_an_unknown_layer() -> None:
    with pytest.raises(ModelError, match="no layer 'heads'; near it are: 'head'"):
        flatout.freeze(nested(), until="heads")


def test_an_optimizer_that_was_built_over_more_steps_each_with_its_own_state() -> None:
    torch = pytest.importorskip("torch")

    def stepped(fused: bool):  # type: ignore[no-untyped-def]
        a, b = (keras.Variable(np.ones(3, "float32"), name=name) for name in "ab")
        adam = keras.optimizers.Adam(0.1)
        adam.build([a, b])
        adam._momentums[0].assign(np.full(3, 5.0))  # of what is frozen by now
        optimizer = KerasOptimizer(adam, [b])
        optimizer.param_groups[0]["fused"] = fused
        b._value.grad = torch.full((3,), 0.5)
        optimizer.step()
        return keras.ops.convert_to_numpy(b)

    np.testing.assert_allclose(stepped(True), stepped(False), rtol=1e-5)
