"""A learning-rate rule for compiled Keras models: as if compiled with the multiplied rate."""

import numpy as np
import pytest

keras = pytest.importorskip("keras")
from keras import layers  # noqa: E402

import flatout  # noqa: E402
from flatout import LrRule  # noqa: E402
from flatout.errors import ModelError  # noqa: E402

if keras.backend.backend() != "torch":
    pytest.skip("Keras is on another backend", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("one_thread")


def points():
    random = np.random.default_rng(0)
    x = random.normal(size=(96, 5)).astype("float32")
    return x, (x @ random.normal(size=(5, 3))).argmax(1)


def compiled(optimizer):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [layers.Input((5,)), layers.Dense(8, activation="relu"), layers.Dense(3)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss)
    return model


class WarmUp(keras.optimizers.schedules.LearningRateSchedule):
    """What the rule should make of a rate, as a schedule of Keras' own."""

    def __init__(self, rate, factors):
        self.rate, self.factors = rate, factors

    def __call__(self, step):
        at = min(int(step), len(self.factors) - 1)
        rate = self.rate(step) if callable(self.rate) else self.rate
        return keras.ops.cast(rate * self.factors[at], "float32")


OPTIMIZERS = {
    "SGD": lambda rate: keras.optimizers.SGD(rate, momentum=0.9),
    "Adam": keras.optimizers.Adam,
    "AdamW": lambda rate: keras.optimizers.AdamW(rate, weight_decay=0.1),
    "scaled losses": lambda rate: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(rate)),
}
RATES = {
    "number": lambda: 0.02,
    "schedule": lambda: keras.optimizers.schedules.ExponentialDecay(0.02, 3, 0.5),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("rate", RATES.values(), ids=RATES)
def test_as_if_compiled_with_the_multiplied_rate(make, rate):
    x, y = points()
    factors = [1, 1.75, 2.5, 3.25, 4]
    theirs, ours = compiled(make(WarmUp(rate(), factors))), compiled(make(rate()))
    quiet = {"allow": "exact", "say": lambda line: None}
    expected = flatout.Trainer(theirs, **quiet).fit(x, y, batch_size=16, epochs=2, verbose=0)
    job = flatout.Trainer(ours, lr_rule=LrRule("linear", 4, warm_up_steps=4), **quiet)
    history = job.fit(x, y, batch_size=16, epochs=2, verbose=0)
    np.testing.assert_allclose(
        history.history["loss"], expected.history["loss"], rtol=1e-6, atol=1e-7
    )
    for one, other in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert history.lr_scale.factor == 4
    start = "learning rate of the schedule times 4: l" if callable(rate()) else "learning rate 0.02"
    assert history.notes[0].startswith(start)


def test_the_optimizer_keeps_its_own_rate():
    x, y = points()
    model = compiled(keras.optimizers.SGD(0.02))
    job = flatout.Trainer(model, lr_rule=LrRule("linear", 4), say=lambda line: None)
    job.fit(x, y, batch_size=16, verbose=0)
    assert float(model.optimizer.learning_rate.numpy()) == pytest.approx(0.02)
    assert isinstance(model.optimizer._learning_rate, keras.Variable)
    assert job.loop.learning_rate == pytest.approx(0.08)
    assert model.optimizer.get_config()["learning_rate"] == pytest.approx(0.02)


def test_batches_that_keras_puts_together_count_together():
    x, y = points()
    model = compiled(keras.optimizers.SGD(0.02, gradient_accumulation_steps=3))
    job = flatout.Trainer(model, lr_rule=LrRule("linear", 4, warm_up=1), say=lambda line: None)
    scale = job.fit(x, y, batch_size=16, verbose=0).lr_scale
    assert (scale.batch, scale.factor, scale.warm_up_steps) == (48, 12, 6)


def test_a_train_step_of_ones_own_is_refused():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(3)

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            return super().train_step(data)

    model = Own()
    model.compile("sgd", "mse")
    job = flatout.Trainer(model, lr_rule=LrRule("linear", 4), say=lambda line: None)
    with pytest.raises(
        ModelError, match=r"Own has its own train_step(.|\n)*an lr_rule has no effect"
    ):
        job.fit(*points())
