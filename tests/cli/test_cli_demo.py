"""`flatout demo`, as its own process; small IDX files keep it short."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader, TensorDataset

from flatout.cli.demo_job import BATCH_SIZE, ConvNet, train_plainly
from flatout.data import digits, idx_split
from idx_files import write

MAIN = "from flatout.cli.main import main; main()"
MNIST = Path(__file__).parents[3] / "shared" / "data" / "mnist"


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FLATOUT_")}
    return subprocess.Popen(
        [sys.executable, "-c", MAIN, "demo", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        # On one thread it does not suffer from what else runs on the machine.
        env={
            **environment,
            "FLATOUT_CACHE": str(folder / "cache"),
            "COLUMNS": "100",
            "OMP_NUM_THREADS": "1",
        },
    )


def demo(folder: Path, *words: str) -> tuple[int, str, str]:
    process = start(folder, *words)
    out, err = process.communicate(timeout=250)
    return process.returncode, out, err


def write_idx(folder: Path, train: int, test: int, size: int = 28) -> Path:
    """So many digits to train on and held out, as the four files of MNIST."""
    folder.mkdir()
    for prefix, part, count in zip(("train", "t10k"), digits(size), (train, test), strict=True):
        images, labels = part.inputs, part.targets
        write(folder / f"{prefix}-images-idx3-ubyte.gz", images[:count, 0].numpy())
        write(folder / f"{prefix}-labels-idx1-ubyte", labels[:count].to(torch.uint8).numpy())
    return folder


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """The folder, the JSON and the rest of what one demo gave."""
    folder = tmp_path_factory.mktemp("demo")
    write_idx(folder / "idx", 640, 200, size=12)
    words = ("--data", "idx", "--epochs", "4", "--run", "here", "--seed", "3", "--json")
    code, out, err = demo(folder, *words)
    assert code == 0, err
    return folder, json.loads(out), err


def test_json_is_one_object_on_stdout(told: tuple[Path, dict[str, Any], str]) -> None:
    _, result, _ = told
    plain, fast = result["jobs"]
    assert (plain["name"], fast["name"]) == ("plain loop", "Flatout")
    assert result["samples"] == {"train": 640, "held_out": 200}
    for job in (plain, fast):
        assert job["epochs"] == 4
        assert job["images_per_s"] == pytest.approx(BATCH_SIZE / job["step_ms"] * 1e3)
        assert job["seconds"] > 0
    assert result["speed"] == pytest.approx(fast["images_per_s"] / plain["images_per_s"])
    assert result["lanes_ms"]["forward"] > 0


def test_the_saved_model_has_the_accuracy_that_is_told(
    told: tuple[Path, dict[str, Any], str],
) -> None:
    folder, result, _ = told
    model = ConvNet(10, 12, 12)
    model.load_state_dict(load_file(folder / result["model"]))
    _, test = idx_split(folder / "idx")
    with torch.no_grad():
        right = (model(test.inputs.float() / 255).argmax(1) == test.targets).float().mean()
    # Ten images: training may have resolved to another precision.
    assert right.item() == pytest.approx(result["jobs"][1]["accuracy"], abs=0.05)
    # Ten steps an epoch teach far more than the 10% of guessing.
    assert result["jobs"][1]["accuracy"] > 0.5
    assert result["jobs"][0]["accuracy"] > 0.5


@pytest.mark.slow
def test_the_tour_is_told(told: tuple[Path, dict[str, Any], str]) -> None:
    folder, _, err = told
    assert "IDX files in idx: 640 images to train on, 200 held out" in err
    assert "plain loop: 4 epochs in" in err
    assert "epoch 4/4  " in err
    for word in ("images/s", "whole job", "accuracy", "plain loop", "Flatout", "1.00x"):
        assert word in err
    assert "what auto chose, and what it measured" in err
    assert "\nstep " in err
    assert "fwd █" in err or "forward █" in err  # short names where the line is long
    assert "saved here/model.safetensors" in err
    assert err.rstrip().endswith("now yours: flatout doctor train.py")
    for name in ("model.safetensors", "log.jsonl", "recipe.toml"):
        assert (folder / "here" / name).is_file()


@pytest.mark.slow
def test_without_options_it_trains_on_digits_and_makes_its_own_folder(tmp_path: Path) -> None:
    code, out, err = demo(tmp_path, "--epochs", "1")
    assert code == 0, err
    assert "scikit-learn's digits, enlarged: 1,437 images to train on, 360 held out" in out
    assert out.rstrip().endswith("now yours: flatout doctor train.py")
    (model,) = tmp_path.glob("runs/demo-*/model.safetensors")
    assert f"saved {model.relative_to(tmp_path)}" in out


@pytest.mark.slow
def test_data_that_is_not_there_is_named(tmp_path: Path) -> None:
    code, _, err = demo(tmp_path, "--data", "nowhere")
    assert code == 1
    assert err.startswith("error: ")
    assert "nowhere" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_run_folder_that_cannot_be_made_is_named_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, out, err = demo(tmp_path, "--run", "file/run")
    assert code == 1
    assert "the run folder cannot be made" in err
    assert "file/run" in err
    assert out == ""


@pytest.mark.slow
def test_images_of_two_sizes_are_refused(tmp_path: Path) -> None:
    folder = write_idx(tmp_path / "idx", 64, 64)
    write(folder / "t10k-images-idx3-ubyte.gz", torch.zeros(64, 20, 20).byte().numpy())
    code, _, err = demo(tmp_path, "--data", "idx")
    assert code == 1
    assert "found (28, 28) to train on and (20, 20) held out" in err


@pytest.mark.slow
def test_ctrl_c_in_the_plain_loop_leaves_with_130(tmp_path: Path) -> None:
    process = start(tmp_path, "--epochs", "1000")
    assert process.stdout is not None
    while "epochs in batches" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err


@pytest.mark.slow
def test_ctrl_c_in_flatouts_fit_leaves_a_checkpoint_and_130(tmp_path: Path) -> None:
    # One short step an epoch, and many of them.
    write_idx(tmp_path / "idx", 64, 32, size=8)
    process = start(tmp_path, "--data", "idx", "--epochs", "150", "--run", "run")
    assert process.stderr is not None
    while "epoch 1/150" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "checkpoint" in err
    assert any((tmp_path / "run" / "checkpoints").iterdir())


# -- the plain loop --------------------------------------------------------------------------------


@pytest.fixture
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_one_thread")
def test_the_plain_loop_learns_and_tells_each_epoch() -> None:
    train, test = ((part.inputs.float() / 255, part.targets) for part in digits(12))
    torch.manual_seed(0)
    model = ConvNet(10, 12, 12)
    seen: list[tuple[int, float]] = []
    job = train_plainly(
        model, train, test, epochs=3, most_s=600, report=lambda *words: seen.append(words)
    )
    assert [epoch for epoch, _ in seen] == [1, 2, 3]
    assert job.accuracy == seen[-1][1] > 0.8
    assert job.epochs == 3
    assert job.seconds * 1e3 > 34 * job.step_ms > 0  # the median of 69
    with torch.no_grad():
        right = sum(
            int((model(x).argmax(1) == y).sum())
            for x, y in DataLoader(TensorDataset(*test), batch_size=100)
        )
    assert right / len(test[1]) == job.accuracy


@pytest.mark.usefixtures("_one_thread")
def test_out_of_time_the_plain_loop_ends_and_gives_no_accuracy() -> None:
    train, test = ((part.inputs.float() / 255, part.targets) for part in digits())
    job = train_plainly(ConvNet(), train, test, epochs=5, most_s=0.0, report=lambda *words: None)
    assert job.epochs == pytest.approx(1 / 23)
    assert job.accuracy is None
    assert job.images_per_s > 0


@pytest.mark.parametrize(("classes", "height", "width"), [(10, 28, 28), (47, 32, 20), (2, 5, 7)])
def test_the_model_takes_images_of_any_size(classes: int, height: int, width: int) -> None:
    assert ConvNet(classes, height, width)(torch.rand(3, 1, height, width)).shape == (3, classes)


@pytest.mark.slow
@pytest.mark.long
def test_mnist_reaches_what_is_promised(tmp_path: Path) -> None:
    if not MNIST.is_dir():
        pytest.skip("MNIST is not at ../shared/data/mnist")
    code, out, err = demo(tmp_path, "--data", str(MNIST), "--json")
    assert code == 0, err
    result = json.loads(out)
    assert result["samples"] == {"train": 8000, "held_out": 2000}
    assert result["jobs"][1]["epochs"] == 5
    assert result["jobs"][1]["accuracy"] >= 0.985
