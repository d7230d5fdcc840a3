"""The losses of 200 steps in fp32, by `keras.Model.fit` and by Flatout, in the same order.

Or by Keras on one thread instead of Flatout: how far another rounding alone leads in these steps.
"""

from __future__ import annotations

import os

import convnet_job
import keras_job

PARSER = convnet_job.parser()
PARSER.add_argument("--optimizer", choices=keras_job.OPTIMIZERS, required=True)
PARSER.add_argument("--against", choices=["exact", "tolerant", "one-thread"], required=True)
PARSER.add_argument("--steps", type=int, default=200)
PARSER.add_argument("--batch", type=int, default=32)
ARGUMENTS = PARSER.parse_args()
keras_job.set_up(ARGUMENTS, "torch")
os.environ["FLATOUT_CACHE"] = str(ARGUMENTS.out.parent / "cache")

import json  # noqa: E402

import keras  # noqa: E402
import torch  # noqa: E402

import flatout  # noqa: E402


class Recorded(keras.losses.SparseCategoricalCrossentropy):
    """The compiled loss, which notes each value that it gives."""

    def __init__(self) -> None:
        super().__init__(from_logits=True)
        self.values: list[torch.Tensor] = []

    def __call__(self, y_true, y_pred, sample_weight=None):
        value = super().__call__(y_true, y_pred, sample_weight)
        self.values.append(value.detach())
        return value

    def last(self, count: int) -> list[float]:
        """Of the latest steps: what was tried before them is not training."""
        return [float(value) for value in self.values[-count:]]


def model_with(loss: Recorded):
    keras.utils.set_random_seed(ARGUMENTS.seed)
    model = keras_job.make_model(ARGUMENTS.optimizer)
    model.compile(optimizer=model.optimizer, loss=loss)
    return model


def fit_by_flatout(model, images, labels, options) -> str:
    # Whatever rounds otherwise is on, where it is allowed.
    on = {} if ARGUMENTS.against == "exact" else {"rewrites": "on", "fused_optimizer": "on"}
    recipe = flatout.Recipe(compute={"precision": "fp32", **on})
    trainer = flatout.Trainer(model, recipe=recipe, allow=ARGUMENTS.against, say=lambda line: None)
    trainer.fit(images, labels, **options)
    return trainer.resolved.summary()


def main() -> None:
    torch.set_num_threads(ARGUMENTS.threads)
    train, _ = convnet_job.load(ARGUMENTS.images)
    count = ARGUMENTS.steps * ARGUMENTS.batch
    images, labels = train.images[:count, ..., None], train.labels[:count]
    plain, flat = Recorded(), Recorded()
    theirs, ours = model_with(plain), model_with(flat)
    ours.set_weights(theirs.get_weights())
    options = {"batch_size": ARGUMENTS.batch, "shuffle": False, "verbose": 0}
    theirs.fit(images, labels, **options)
    if ARGUMENTS.against == "one-thread":
        torch.set_num_threads(1)
        ours.fit(images, labels, **options)
        ran = "Keras on one thread"
    else:
        ran = fit_by_flatout(ours, images, labels, options)
    result = {
        "plain": plain.last(ARGUMENTS.steps),
        "flatout": flat.last(ARGUMENTS.steps),
        "ran": ran,
    }
    ARGUMENTS.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
