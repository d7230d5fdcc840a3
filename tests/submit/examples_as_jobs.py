"""The examples of the click-through job and of the image job, as jobs of two ranks."""

import re
import shutil
from pathlib import Path

EXAMPLES = ("click_through", "transfer")
FOLDER = Path(__file__).parents[2] / "examples"
NETWORK = """\
from torch import nn


def net():
    layers = [nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(8, 10))
"""


def example(name, root, shared):
    """Puts the code of an example into a folder.

    Returns its files, and its command line; what it reads and leaves lies in `shared`.
    """
    shutil.copy(FOLDER / f"{name}.py", root)
    shared.mkdir()
    if name == "click_through":
        return [f"{name}.py"], [f"{name}.py", "--epochs", "1", "--out", str(shared)]
    (root / "small.py").write_text(NETWORK)
    write_photographs(shared)
    folders = [str(shared / "train"), str(shared / "val")]
    options = ["--model", "small:net", "--size", "64", "--epochs", "5"]
    return [f"{name}.py", "small.py"], [f"{name}.py", *folders, *options]


def check(name, said, shared):
    """That an example has trained one model on two ranks, by what they have printed."""
    assert "2 ranks" in said
    if name == "click_through":
        assert (shared / "deepfm.safetensors").exists()
        assert "(before training, same rows:" in said  # the second day went on from the first
    else:
        (figure, *_) = re.findall(r"held out: loss \S+ accuracy (\S+)", said)
        assert float(figure) > 0.9


def write_photographs(folder):
    """Pieces of two photographs, a class each."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    for name, photograph in zip(("temple", "flower"), load_sample_images().images, strict=True):
        for number in range(60):
            part = "val" if number % 4 == 0 else "train"
            file = folder / part / name / f"{number}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            top, left = 3 * number, 5 * number
            Image.fromarray(photograph[top : top + 240, left : left + 320]).save(file)
