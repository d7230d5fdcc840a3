"""Fashion-MNIST as a Keras model: train with an input function, time each epoch, save, predict.

flatout run examples/fashion_mnist_keras.py [FOLDER] [epochs]

FOLDER holds the IDX files, packed by gzip or not; what is missing is fetched. `flatout run` sees to
it that Keras takes its torch backend.
"""

import sys
import time
from pathlib import Path

import keras
import numpy as np
from keras import layers

import flatout

KINDS = ["T-shirt", "Trouser", "Pullover", "Dress", "Coat"]
KINDS += ["Sandal", "Shirt", "Sneaker", "Bag", "Boot"]

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "data/fashion_mnist")
epochs = int(sys.argv[2]) if len(sys.argv) > 2 else 5
if not (list(folder.glob("train-images*")) and list(folder.glob("t10k-images*"))):
    flatout.data.fetch("fashion_mnist", folder)


def input_fn(part):
    """Images with their channel last, from 0 to 1, and labels: what `fit` takes."""
    images = part.inputs.permute(0, 2, 3, 1).numpy().astype("float32") * part.scale
    return images, part.targets.numpy()


train, test = map(input_fn, flatout.data.idx_split(folder))


class TimeHistory(keras.callbacks.Callback):
    """Seconds of each epoch, and milliseconds of a step."""

    def on_epoch_begin(self, epoch, logs=None):
        self.began = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        seconds = time.perf_counter() - self.began
        ms = seconds / self.params["steps"] * 1e3
        print(f"epoch {epoch + 1}: {seconds:.2f} s, {ms:.2f} ms a step")


keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        layers.Input((28, 28, 1)),
        layers.Conv2D(32, 3, activation="relu"),
        layers.MaxPooling2D(2),
        layers.Conv2D(64, 3, activation="relu"),
        layers.MaxPooling2D(2),
        layers.Flatten(),
        layers.Dense(64, activation="relu"),
        layers.Dense(len(KINDS), activation="softmax"),
    ]
)
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])

trainer = flatout.Trainer(model)
history = trainer.fit(*train, batch_size=64, epochs=epochs, callbacks=[TimeHistory()])
print(f"{history.throughput:,.0f} samples/s at the median step")

figures = trainer.evaluate(*test)
print(f"held out: loss {figures['loss']:.4f} accuracy {figures['accuracy']:.4f}")
trainer.save("fashion_mnist.keras")

again = keras.saving.load_model("fashion_mnist.keras")
images, labels = test
answers = np.argmax(flatout.Trainer(again).predict(images[:5]), axis=1)
for answer, label in zip(answers, labels, strict=False):
    print(f"predicted {KINDS[answer]}, it is {KINDS[label]}")
