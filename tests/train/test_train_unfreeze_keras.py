"""Unfreeze of compiled Keras models: their optimizer goes on, and takes the new weights."""

from types import SimpleNamespace

import numpy as np
import pytest

keras = pytest.importorskip("keras")
from keras import layers  # noqa: E402

import flatout  # noqa: E402
from flatout.errors import ModelError  # noqa: E402
from flatout.optim import KerasOptimizer  # noqa: E402

if keras.backend.backend() != "torch":
    pytest.skip("Keras is on another backend", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("one_thread")

DECAY = keras.optimizers.schedules.ExponentialDecay
OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.01),
    "clipped": lambda: keras.optimizers.AdamW(DECAY(0.01, 3, 0.9), global_clipnorm=0.1),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9, weight_decay=0.01),
    "nadam": lambda: keras.optimizers.Nadam(0.01),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)),
    "averaged": lambda: keras.optimizers.RMSprop(0.01, momentum=0.5, gradient_accumulation_steps=2),
}


def model(optimizer="adam"):
    keras.utils.set_random_seed(0)
    made = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, name="a"),
            layers.BatchNormalization(name="n"),
            layers.Dropout(0.5, name="d"),
            layers.Dense(8, activation="tanh", name="b"),
            layers.Dense(3, activation="softmax", name="head"),
        ]
    )
    flatout.freeze(made, until="b")
    made.compile(OPTIMIZERS.get(optimizer, lambda: optimizer)(), "sparse_categorical_crossentropy")
    return made


def data():
    x = np.random.default_rng(1).normal(size=(48, 6)).astype("float32")
    return x, np.arange(48) % 3


def fit(made, callbacks, epochs=4, allow="exact", **options):
    run = options.pop("run", None)
    trainer = flatout.Trainer(made, allow=allow, run=run, say=len)
    arguments = {"batch_size": 16, "shuffle": False, "progress": False, **options}
    trainer.fit(*data(), epochs=epochs, callbacks=callbacks, **arguments)
    return trainer


def same(a, b, tolerance=0.0):
    for x, y in zip(a.get_weights(), b.get_weights(), strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_is_what_keras_gives_with_an_optimizer_that_had_all_from_the_start(name):
    theirs = model(name)
    every = [v for layer in theirs.layers for v in layer._trainable_variables]
    theirs.optimizer.build(every)
    options = {"batch_size": 16, "shuffle": False, "verbose": 0}
    theirs.fit(*data(), epochs=2, **options)
    flatout.unfreeze(theirs, "b")
    theirs.fit(*data(), epochs=4, initial_epoch=2, **options)

    ours = model(name)
    optimizer = ours.optimizer
    fit(ours, [flatout.Unfreeze(3, "b")])
    same(ours, theirs, 1e-6)
    assert ours.optimizer is optimizer
    assert not np.array_equal(ours.get_layer("b").get_weights()[0], model().get_weights()[6])


@pytest.mark.parametrize("stop", [1, 2, 3])
@pytest.mark.parametrize("allow", ["exact", "tolerant"])
def test_a_resume_in_any_phase_is_bitwise(stop, allow, tmp_path):
    def callbacks():
        return [flatout.Unfreeze(2, "b", lr=1e-3), flatout.Unfreeze(3, "a")]

    whole, again, run = model("momentum"), model("momentum"), str(tmp_path / "run")
    fit(whole, callbacks(), allow=allow)
    fit(model("momentum"), callbacks(), stop, allow=allow, run=run)
    trainer = fit(again, callbacks(), allow=allow, run=run, resume=True)
    same(again, whole)
    assert [len(group["params"]) for group in trainer.optimizer.param_groups] == [4, 2]


def test_a_file_after_the_thaw_is_what_keras_goes_on_from(tmp_path):
    ours = model()
    fit(ours, [flatout.Unfreeze(2, "b")])
    ours.save(tmp_path / "model.keras")
    theirs = keras.models.load_model(tmp_path / "model.keras")
    for a, b in zip(ours.optimizer.variables, theirs.optimizer.variables, strict=True):
        np.testing.assert_array_equal(*map(keras.ops.convert_to_numpy, (a, b)))
    flatout.freeze(theirs, layers="d")  # whose dropout a file does not keep
    for one in (ours, theirs):
        keras.utils.set_random_seed(0)
        one.fit(*data(), batch_size=16, shuffle=False, verbose=0)
    same(ours, theirs)


def test_layers_that_thaw_between_two_fits_join_the_optimizer():
    ours = model()
    trainer = fit(ours, [], 2)
    kept = keras.ops.convert_to_numpy(ours.optimizer._momentums[0]).copy()
    flatout.unfreeze(ours, "b")
    trainer.fit(*data(), epochs=0, progress=False)
    momentum, *_ = (m for m in ours.optimizer._momentums if tuple(m.shape) == kept.shape)
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(momentum), kept)
    assert len(ours.optimizer._momentums) == 4


@pytest.mark.parametrize("fused", ["off", "on"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_rate_of_their_own_is_a_multiple_of_the_optimizers(name, fused):
    def stepped(lr):
        made = model(name)
        optimizer = KerasOptimizer(made.optimizer, made.trainable_variables)
        waiting = list(made.get_layer("b")._trainable_variables)
        optimizer.hold([v._value for v in waiting], made, lr)
        flatout.unfreeze(made, "b")
        optimizer.begin()
        if fused == "on" and not optimizer.can_be_fused:
            pytest.skip("Keras steps it")
        for group in optimizer.param_groups:
            group["fused"] = fused == "on"
        before = made.get_weights()
        gradients = [variable._value.detach() + 0.1 for variable in made.trainable_variables]
        for _ in range(2):
            for variable, gradient in zip(made.trainable_variables, gradients, strict=True):
                variable._value.grad = gradient.clone()
            optimizer.step()
        return before, made.get_weights()

    rate = float(model(name).optimizer.learning_rate)
    before, plain = stepped(None)
    _, same_rate = stepped(rate)
    _, tenth = stepped(rate / 10)
    places = {"b": (6, 7), "head": (8, 9)}
    for place in places["head"]:
        np.testing.assert_array_equal(tenth[place], plain[place])
    for place in places["b"]:
        np.testing.assert_array_equal(same_rate[place], plain[place])
        moved = np.abs(plain[place] - before[place]).mean()
        ratio = np.abs(tenth[place] - before[place]).mean() / moved
        assert 0.08 < ratio < 0.12


def test_what_cannot_be_is_said_before_the_first_step():
    with pytest.raises(ModelError, match="no layer 'nine'"):
        fit(model(), [flatout.Unfreeze(2, "nine")])
    schedule = keras.optimizers.schedules.PolynomialDecay(0.0, 10, 0.1)
    with pytest.raises(ModelError, match="begins at 0"):
        fit(model(keras.optimizers.SGD(schedule)), [flatout.Unfreeze(2, lr=0.1)])


class Hidden(keras.optimizers.SGD):
    """Keeps slots where only itself finds them."""

    def build(self, variables):
        super().build(variables)
        self._own = SimpleNamespace(slots=self.add_optimizer_variables(variables, "own"))


def test_a_state_whose_weights_cannot_be_told_is_refused():
    with pytest.raises(ModelError, match="Hidden does not tell which part of its state"):
        fit(model(Hidden(0.1)), [flatout.Unfreeze(2, "b")])
