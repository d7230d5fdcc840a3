"""`keras.applications.VGG16` on torch (a DataLoader and Pillow) or TensorFlow (tf.data).

tf.data keeps decoded pixels in memory. bf16 is the policy `mixed_bfloat16`. Everything else is
Keras' own default: channels last, and XLA left off for TensorFlow on a CPU.
"""

from __future__ import annotations

from typing import Any

import keras_job
import transfer_job

PARSER = transfer_job.parser()
PARSER.add_argument("--backend", choices=["torch", "tensorflow"], required=True)
ARGUMENTS = PARSER.parse_args()
keras_job.set_up(ARGUMENTS, ARGUMENTS.backend)

import keras  # noqa: E402
from keras_clock import Clock  # noqa: E402
from stamps import Stamps  # noqa: E402


def make_model() -> Any:
    side = ARGUMENTS.size
    vgg = keras.applications.VGG16(weights=None, include_top=False, input_shape=(side, side, 3))
    for layer in vgg.layers:
        layer.trainable = layer.name.startswith("block5") and not ARGUMENTS.head_only
    head = keras.layers.Dense(transfer_job.CLASSES, dtype="float32")
    model = keras.Sequential([vgg, keras.layers.Flatten(), head])
    model.compile(
        optimizer=keras.optimizers.Adam(ARGUMENTS.lr),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def torch_images() -> Any:
    import torch
    import transfer_torch

    torch.set_num_threads(ARGUMENTS.threads)
    images = transfer_torch.Photographs(ARGUMENTS.images, ARGUMENTS.size, channels_last=True)
    return transfer_torch.loader(images)


def tensorflow_images() -> Any:
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(ARGUMENTS.threads)
    tf.config.threading.set_inter_op_parallelism_threads(ARGUMENTS.threads)
    paths, labels = transfer_job.files(ARGUMENTS.images)

    def decode(path: Any, label: Any) -> tuple[Any, Any]:
        pixels = tf.io.decode_jpeg(tf.io.read_file(path), channels=3)
        small = tf.image.resize(pixels, (ARGUMENTS.size, ARGUMENTS.size), antialias=True)
        return tf.cast(small + 0.5, tf.uint8), label

    files = tf.data.Dataset.from_tensor_slices((paths, labels))
    images = files.map(decode, num_parallel_calls=ARGUMENTS.threads).cache().shuffle(len(paths))
    batches = images.batch(transfer_job.BATCH)
    return batches.map(lambda x, y: (tf.cast(x, tf.float32) / 255, y)).prefetch(2)


def main() -> None:
    images = torch_images() if ARGUMENTS.backend == "torch" else tensorflow_images()
    keras.utils.set_random_seed(0)
    if ARGUMENTS.precision == "bf16":
        keras.mixed_precision.set_global_policy("mixed_bfloat16")
    model = make_model()
    stamps = Stamps()
    options = {"shuffle": False, "verbose": 0}  # the images come shuffled
    model.fit(images, epochs=1 + ARGUMENTS.epochs, callbacks=[Clock(stamps)], **options)
    count = len(transfer_job.files(ARGUMENTS.images)[0])
    transfer_job.report(ARGUMENTS.out, stamps, images=count)


if __name__ == "__main__":
    main()
