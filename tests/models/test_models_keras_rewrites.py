"""Keras layers that call torch's operators directly: the same numbers, and nothing left behind."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

keras = pytest.importorskip("keras")
from keras import layers  # noqa: E402

from flatout.kernels import relu_pool as kernel  # noqa: E402
from flatout.models import find_rewrites  # noqa: E402
from flatout.models.keras.rewrites import keras_calls, training_step  # noqa: E402

if keras.backend.backend() != "torch":
    pytest.skip("Keras is on another backend", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("one_thread")


def network(*more, side=13):
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            layers.Input((side, side, 2)),
            layers.Conv2D(16, 3, padding="same", activation="relu", bias_initializer="normal"),
            layers.MaxPooling2D(2),
            *more,
            layers.Flatten(),
            layers.Dense(8, activation="gelu", bias_initializer="normal"),
            layers.Dropout(0.3, seed=1),
            layers.Dense(3),
        ]
    )


def outcome(model, x, step=True, autocast=False):
    """Output and gradients of a training step."""
    model.zero_grad()
    for variable in model.non_trainable_variables:
        if "seed" in variable.path:
            variable.assign([1, 1])
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        if step:
            with training_step():
                y = model(x, training=True)
        else:
            y = model(x, training=True)
    y.float().mul(torch.linspace(0.1, 1, y.numel()).reshape(y.shape)).sum().backward()
    return [y.detach(), *(v.value.grad for v in model.trainable_variables)]


def rewritten(model):
    (rewrite,) = find_rewrites(model)
    return rewrite.apply()


def images(count=16, side=13):
    torch.manual_seed(0)
    return torch.randn(count, side, side, 2)


def assert_close(ours, plain, tolerance=2e-5):
    for a, b in zip(ours, plain, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * float(b.abs().max()))


CONVOLUTIONS = {
    "valid": {"padding": "valid"},
    "same": {"padding": "same"},
    "same, even kernel": {"padding": "same", "kernel_size": 2},
    "same, strided": {"padding": "same", "strides": 2},
    "strided": {"padding": "valid", "strides": (2, 1)},
    "dilated": {"padding": "same", "dilation_rate": 2},
    "grouped": {"padding": "same", "groups": 2},
    "without bias": {"use_bias": False},
    "tanh": {"activation": "tanh"},
}


@pytest.mark.parametrize("step", [True, False])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_of_any_kind_gives_the_same(name, step):
    options = {"kernel_size": 3, "activation": "relu", **CONVOLUTIONS[name]}
    model = network(layers.Conv2D(8, bias_initializer="normal", **options), layers.MaxPooling2D(2))
    plain = outcome(model, images())
    undo = rewritten(model)
    assert_close(outcome(model, images(), step), plain)
    undo()
    assert_close(outcome(model, images()), plain, 0)


POOLS = {
    "2x2": {"pool_size": 2},
    "3x3": {"pool_size": 3},
    "overlapping": {"pool_size": 3, "strides": 1},
    "same": {"pool_size": 2, "padding": "same"},
}


@pytest.mark.parametrize("name", POOLS)
def test_a_pool_of_any_kind_gives_the_same(name):
    model = network(layers.Conv2D(8, 3, activation="relu"), layers.MaxPooling2D(**POOLS[name]))
    plain = outcome(model, images())
    rewritten(model)
    assert_close(outcome(model, images()), plain)


@pytest.mark.skipif(kernel._c is None, reason="the C extension is not built")
@pytest.mark.parametrize("autocast", [True, False])
def test_relu_and_pool_run_as_one_kernel(autocast, monkeypatch):
    ran = []
    forward = kernel.forward
    monkeypatch.setattr(kernel, "forward", lambda x: ran.append(x.dtype) or forward(x))
    model = network(side=28)
    plain = outcome(model, images(side=28), autocast=autocast)
    rewritten(model)
    ours = outcome(model, images(side=28), autocast=autocast)
    assert ran == [torch.bfloat16 if autocast else torch.float32]
    for a, b in zip(ours, plain, strict=True):
        error = (a.float() - b.float()).abs().max()
        assert error <= (0.03 if autocast else 2e-5) * b.abs().max()


def test_outside_of_a_step_a_layer_gives_its_activated_output():
    model = network()
    features = keras.Model(model.inputs, model.layers[0].output)
    before = features(images())
    rewritten(model)
    torch.testing.assert_close(features(images()), before, rtol=1e-5, atol=1e-5)
    assert features(images()).min() >= 0


def test_an_activation_that_something_else_reads_stays():
    a = layers.Input((12, 12, 2))
    y = layers.Conv2D(16, 3, activation="relu", bias_initializer="normal")(a)
    pooled = layers.MaxPooling2D(2)(y)
    model = keras.Model(a, layers.Dense(2)(layers.Flatten()(pooled)) + layers.Dense(2)(
        layers.GlobalAveragePooling2D()(y)
    ))  # fmt: skip
    plain = outcome(model, images(side=12))
    rewritten(model)
    assert_close(outcome(model, images(side=12)), plain)


def test_an_activation_that_the_model_returns_stays():
    a = layers.Input((12, 12, 2))
    y = layers.Conv2D(16, 3, activation="relu", bias_initializer="normal")(a)
    model = keras.Model(a, [layers.MaxPooling2D(2)(y), y])
    expected = model(images(side=12))
    rewritten(model)
    with training_step():
        found = model(images(side=12), training=True)
    for ours, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)


class Written(keras.Model):
    """Code between the layers, which may look at what they give."""

    def __init__(self):
        super().__init__()
        self.conv, self.pool = layers.Conv2D(16, 3, activation="relu"), layers.MaxPooling2D(2)

    def call(self, x):
        y = self.conv(x)
        return self.pool(y) + keras.ops.mean(y)


def test_in_a_model_with_its_own_call_no_activation_moves():
    keras.utils.set_random_seed(0)
    model = Written()
    expected = model(images())
    rewritten(model)
    with training_step():
        torch.testing.assert_close(model(images()), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "layer",
    [
        layers.Conv2D(4, 3, data_format="channels_first"),
        layers.MaxPooling2D(2, data_format="channels_first"),
        type("Own", (layers.Conv2D,), {})(4, 3),
        layers.DepthwiseConv2D(3),
        layers.AveragePooling2D(2),
    ],
    ids=lambda layer: f"{type(layer).__name__}-{layer.data_format}",
)
def test_other_layers_are_left_alone(layer):
    model = keras.Sequential([layers.Input((8, 8, 8)), layer])
    assert keras_calls(model) == {}
    assert find_rewrites(model) == []


def test_nothing_is_left_behind():
    model = network()
    before = [dict(vars(layer)) for layer in model._flatten_layers()]
    config = model.to_json()
    undo = rewritten(model)
    assert model.to_json() == config
    undo()
    assert [dict(vars(layer)) for layer in model._flatten_layers()] == before


def test_a_copy_made_in_training_is_whole(tmp_path):
    model = network()
    rewritten(model)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    clone = copy.deepcopy(model.to_json())
    assert keras.models.model_from_json(clone).count_params() == model.count_params()
    x = images()
    torch.testing.assert_close(loaded(x), model(x), rtol=1e-5, atol=1e-5)


def test_a_policy_of_the_user_is_kept():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            layers.Input((12, 12, 2)),
            layers.Conv2D(16, 3, activation="relu", dtype="mixed_bfloat16"),
            layers.MaxPooling2D(2, dtype="mixed_bfloat16"),
            layers.Dense(2, dtype="float64"),
        ]
    )
    plain = outcome(model, images(side=12))
    rewritten(model)
    ours = outcome(model, images(side=12))
    assert [a.dtype for a in ours] == [b.dtype for b in plain]
    for a, b in zip(ours, plain, strict=True):
        assert (a.double() - b.double()).abs().max() <= 0.03 * b.abs().max()


def test_inputs_in_another_precision_are_cast_as_before():
    model = network()
    x = np.asarray(images(), "float64")
    expected = model(x)
    rewritten(model)
    found = model(x)
    assert found.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
