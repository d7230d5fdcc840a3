"""A Keras model under Flatout's Trainer: `model.fit(...)` as `Trainer(model).fit(...)`."""

from __future__ import annotations

import os

import convnet_job
import keras_job

PARSER = convnet_job.parser()
PARSER.add_argument("--default", action="store_true", help="no settings: auto chooses them all")
ARGUMENTS = PARSER.parse_args()
keras_job.set_up(ARGUMENTS, "torch")
# Every restart decides for itself, as on a machine that has never seen the job.
os.environ["FLATOUT_CACHE"] = str(ARGUMENTS.out.parent / "cache")

import keras  # noqa: E402
import torch  # noqa: E402
from keras_clock import Clock  # noqa: E402
from stamps import Stamps, report  # noqa: E402

import flatout  # noqa: E402


def main() -> None:
    torch.set_num_threads(ARGUMENTS.threads)
    keras.utils.set_random_seed(ARGUMENTS.seed)
    train, held_out = convnet_job.load(ARGUMENTS.images)
    model = keras_job.make_model()
    recipe = None
    if not ARGUMENTS.default:
        recipe = flatout.Recipe(compute={"precision": ARGUMENTS.precision})
    stamps = Stamps()
    decisions: list[str] = []
    trainer = flatout.Trainer(model, recipe=recipe, say=decisions.append)
    trainer.fit(
        train.images[..., None],
        train.labels,
        batch_size=convnet_job.BATCH,
        epochs=1 + ARGUMENTS.epochs,
        verbose=0,
        callbacks=[Clock(stamps)],
    )
    logits = model.predict(held_out.images[..., None], batch_size=convnet_job.BATCH, verbose=0)
    accuracy = float((logits.argmax(1) == held_out.labels).mean())
    steps = -(-len(train.images) // convnet_job.BATCH)
    report(ARGUMENTS.out, stamps, steps=steps, accuracy=accuracy, note="; ".join(decisions))


if __name__ == "__main__":
    main()
