"""Fashion-MNIST in PyTorch: train with an input function, time each epoch, evaluate, save, predict.

python examples/fashion_mnist.py [FOLDER] [epochs]

FOLDER holds the IDX files, packed by gzip or not; what is missing is fetched. Any other data set in
such files does as well.
"""

import sys
import time
from pathlib import Path

import torch

import flatout

KINDS = ["T-shirt", "Trouser", "Pullover", "Dress", "Coat"]
KINDS += ["Sandal", "Shirt", "Sneaker", "Bag", "Boot"]

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "data/fashion_mnist")
epochs = int(sys.argv[2]) if len(sys.argv) > 2 else 5
if not (list(folder.glob("train-images*")) and list(folder.glob("t10k-images*"))):
    flatout.data.fetch("fashion_mnist", folder)
train, test = flatout.data.idx_split(folder)


def input_fn():
    """The batches of one epoch, in a new order, as an input function gave them to an Estimator."""
    for part in torch.randperm(len(train)).split(64):
        yield train.inputs[part] * train.scale, train.targets[part]


class TimeHistory(flatout.Callback):
    """Seconds of each epoch, and milliseconds of a step."""

    def on_epoch_start(self, state):
        self.began, self.first_step = time.perf_counter(), state.step

    def on_epoch_end(self, state):
        seconds = time.perf_counter() - self.began
        steps = state.step - self.first_step
        print(f"epoch {state.epoch + 1}: {seconds:.2f} s, {seconds / steps * 1e3:.2f} ms a step")


def make_model():
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 32, 3),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(32, 64, 3),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(64 * 5 * 5, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, len(KINDS)),
    )


torch.manual_seed(0)
trainer = flatout.Trainer(make_model(), loss="cross_entropy", metrics=["accuracy"])
history = trainer.fit(input_fn, epochs=epochs, callbacks=[TimeHistory()])
print(f"{history.throughput:,.0f} samples/s at the median step")

figures = trainer.evaluate(test)
print(f"held out: loss {figures['loss']:.4f} accuracy {figures['accuracy']:.4f}")
trainer.save("fashion_mnist.safetensors")

again = flatout.Trainer(make_model(), loss="cross_entropy", metrics=["accuracy"])
again.load("fashion_mnist.safetensors")
few = test.part(0, 5)
answers = again.predict(few.inputs * few.scale).argmax(1)
for answer, label in zip(answers.tolist(), few.targets.tolist(), strict=True):
    print(f"predicted {KINDS[answer]}, it is {KINDS[label]}")
