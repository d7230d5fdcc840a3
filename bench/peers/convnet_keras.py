"""Keras on torch, TensorFlow or JAX: arrays given to `fit`, no metrics, no progress bar.

Everything else is Keras' own default: channels last, and `jit_compile="auto"`, which leaves XLA off
for TensorFlow on a CPU (there it is several times slower). bf16 is the policy `mixed_bfloat16`.
"""

from __future__ import annotations

import convnet_job
import keras_job

PARSER = convnet_job.parser()
PARSER.add_argument("--backend", choices=["torch", "tensorflow", "jax"], required=True)
ARGUMENTS = PARSER.parse_args()
keras_job.set_up(ARGUMENTS, ARGUMENTS.backend)

import keras  # noqa: E402
from keras_clock import Clock, set_threads  # noqa: E402
from stamps import Stamps, report  # noqa: E402


def main() -> None:
    set_threads(ARGUMENTS.threads)
    keras.utils.set_random_seed(ARGUMENTS.seed)
    if ARGUMENTS.precision == "bf16":
        keras.mixed_precision.set_global_policy("mixed_bfloat16")
    train, held_out = convnet_job.load(ARGUMENTS.images)
    model = keras_job.make_model()
    stamps = Stamps()
    model.fit(
        train.images[..., None],
        train.labels,
        batch_size=convnet_job.BATCH,
        epochs=1 + ARGUMENTS.epochs,
        shuffle=True,
        verbose=0,
        callbacks=[Clock(stamps)],
    )

    logits = model.predict(held_out.images[..., None], batch_size=convnet_job.BATCH, verbose=0)
    accuracy = float((logits.argmax(1) == held_out.labels).mean())
    steps = -(-len(train.images) // convnet_job.BATCH)
    report(ARGUMENTS.out, stamps, steps=steps, accuracy=accuracy)


if __name__ == "__main__":
    main()
