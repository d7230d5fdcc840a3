"""The benches run as a user runs them, at their smallest, for the parts that need no peer."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from idx_files import write

BENCH = Path(__file__).parents[2] / "bench"

pytestmark = pytest.mark.slow


def run_bench(name, *arguments, cwd):
    done = subprocess.run(
        [sys.executable, str(BENCH / name), "--restarts", "1", "--json", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert not list(cwd.iterdir())
    return json.loads(done.stdout)


@pytest.mark.long
def test_trainer(tmp_path):
    chosen = {"handwritten", "trainer", "trainer-again", "dataloader"}
    arguments = ["--epochs", "2", "--samples", "640", "--only", *chosen]
    found = run_bench("trainer.py", *arguments, cwd=tmp_path)
    rows = {row["name"]: row for row in found["rows"]}
    assert {name for name, row in rows.items() if row["seconds_per_step"]} == chosen
    assert {rows[name]["reason"] for name in chosen} == {""}
    assert rows["lightning"]["reason"]
    assert found["keys"]["trainer_vs_handwritten"] > 0
    assert found["keys"]["trainer_vs_itself"] > 0
    assert found["keys"]["lightning_vs_trainer"] is None


@pytest.mark.skipif(find_spec("lightning") is not None, reason="lightning is installed")
def test_absent_peers_are_named(tmp_path):
    arguments = ["--epochs", "1", "--samples", "64", "--only", "lightning", "handwritten"]
    found = run_bench("trainer.py", *arguments, cwd=tmp_path)
    rows = {row["name"]: row for row in found["rows"]}
    assert rows["lightning"]["reason"] == "absent: lightning is not installed"
    assert rows["handwritten"]["reason"] == ""


@pytest.mark.skipif(find_spec("jax") is None, reason="jax is not installed")
def test_jax_learns_by_steps_and_by_a_scan_alike(tmp_path):
    arguments = ["--epochs", "4", "--samples", "2048", "--only", "jax", "jax-scan"]
    found = run_bench("trainer.py", *arguments, cwd=tmp_path)
    rows = {row["name"]: row for row in found["rows"]}
    (by_steps,), (by_scan,) = (rows[name]["accuracies"] for name in ("jax", "jax-scan"))
    assert by_steps == pytest.approx(by_scan, abs=0.01)
    assert by_steps > 0.4


@pytest.mark.long
def test_convnet(tmp_path):
    chosen = {"flatout", "torch-fp32", "torch-bf16"}
    arguments = ["--epochs", "1", "--images", "512", "--only", *chosen]
    found = run_bench("convnet.py", *arguments, cwd=tmp_path)
    rows = {row["name"]: row for row in found["rows"]}
    assert {name for name, row in rows.items() if row["seconds_per_step"]} == chosen
    assert rows["flatout"]["notes"][0].startswith("auto: ")
    assert found["keys"]["vs_plain_torch"] > 0
    assert found["keys"]["vs_best_peer"] > 0
    assert found["keys"]["same_accuracy"] is None
    assert found["details"]["same_accuracy"]["note"] == "needs --data"


@pytest.mark.long
def test_transfer(tmp_path):
    chosen = {"flatout", "torch-fp32", "torch-bf16"}
    arguments = ["--images", "40", "--size", "32", "--epochs", "2", "--loss-steps", "0"]
    found = run_bench("transfer.py", *arguments, "--only", *chosen, cwd=tmp_path)
    rows = {row["name"]: row for row in found["rows"]}
    assert {name for name, row in rows.items() if row["seconds_per_step"]} == chosen
    assert {rows[name]["reason"] for name in chosen} == {""}
    assert all(rows[name]["first_seconds_per_step"][0] > 0 for name in chosen)
    assert found["keys"]["later_epochs_vs_plain"] > 0
    assert found["keys"]["five_epochs_vs_best_peer"] > 0
    assert found["keys"]["live_flops_vs_matmul"] > 0
    assert found["keys"]["head_only_vs_plain"] is None


def test_augment(tmp_path):
    arguments = ["--images", "8", "--size", "64", "--batch", "4", "--seconds", "0.01"]
    found = run_bench("augment.py", *arguments, "--only", "flatout", "pillow", cwd=tmp_path)
    assert set(found["images_per_s"]) == {"flatout", "flatout again", "pillow"}
    assert found["keys"]["all_vs_best_peer"] > 0
    assert found["details"]["all_vs_best_peer"]["note"] == "pillow"
    assert found["keys"]["all_vs_itself"] > 0
    assert found["keys"]["mixup_vs_best_peer"] is None


@pytest.mark.long
def test_click(tmp_path):
    chosen = {"flatout-fp32", "adam", "sparse-adam"}
    arguments = ["--steps", "4", "--epochs", "1", "--equal-steps", "20", "--most-rows", "100"]
    wanted = {"dense_equal", "bitwise_on_threads", "auc_difference", "file_to_step_input_wait"}
    found = run_bench("click.py", *arguments, "--only", *chosen, *wanted, cwd=tmp_path)
    rows = {row["name"]: row for row in found["rows"]}
    assert {name for name, row in rows.items() if row["seconds_per_step"]} == chosen
    assert set(found["keys"]) == wanted
    assert found["keys"]["auc_difference"] < 1e-3
    assert found["keys"]["dense_equal"] < 1e-5
    assert found["keys"]["bitwise_on_threads"] == 1
    assert 0 <= found["keys"]["file_to_step_input_wait"] < 1


def test_startup(tmp_path):
    found = run_bench("startup.py", cwd=tmp_path)
    assert found["keys"]["help_ms"] > 0
    assert isinstance(found["keys"]["import_ms"], float)
    assert {row["reason"] for row in found["rows"]} == {""}


def test_recording(tmp_path):
    found = run_bench("recording.py", "--steps", "640", cwd=tmp_path)
    assert found["keys"]["recording_use_us_per_step"] > 0


@pytest.mark.long
def test_overhead(tmp_path):
    arguments = ["--rounds", "1", "--only", "mlp, 20 epochs"]
    found = run_bench("overhead.py", *arguments, cwd=tmp_path)
    assert isinstance(found["keys"]["fit_overhead_s"], float)
    (row,) = found["rows"]
    assert 0 <= row["measuring_s"] < row["fit_s"]
    assert row["said"]


@pytest.mark.long
def test_evaluation(tmp_path):
    arguments = ["--seconds", "0.1", "--batches", "2", "--only", "mlp"]
    found = run_bench("evaluation.py", *arguments, cwd=tmp_path)
    assert [(row["family"], row["verb"]) for row in found["rows"]] == [
        ("mlp", "evaluate"),
        ("mlp", "predict"),
    ]
    assert found["keys"]["apart"] < 1e-4
    assert found["keys"]["evaluation_vs_plain"] > 0


@pytest.mark.long
def test_breadth(tmp_path):
    found = run_bench("breadth.py", "--seconds", "1", "--only", "mlp", cwd=tmp_path)
    (row,) = found["rows"]
    assert set(row["hand_s"]) == {"fp32", "fused", "bf16", "bf16+fused"}
    assert row["vs_plain"] > 0
    assert found["keys"]["seconds_before_first_step"] >= 0


@pytest.mark.long
def test_choices(tmp_path):
    arguments = ["--seconds", "1", "--runs", "2", "--only", "mlp"]
    found = run_bench("choices.py", *arguments, cwd=tmp_path)
    (row,) = found["rows"]
    assert len(row["chosen"]) == 2
    assert 0 <= found["keys"]["chosen_again"] <= 1


def test_observing(tmp_path):
    found = run_bench("observing.py", "--quadruples", "8", cwd=tmp_path)
    assert found["keys"]["added_us_counted"] > 0
    assert {len(values) for values in found["differences"].values()} == {8}


def test_large_batches(tmp_path):
    source = tmp_path / "images"
    source.mkdir()
    rng = np.random.default_rng(0)
    write(source / "train-images-idx3-ubyte", rng.integers(0, 256, (2400, 28, 28), np.uint8))
    write(source / "train-labels-idx1-ubyte", rng.integers(0, 10, 2400, np.uint8))
    beside = tmp_path / "beside"
    beside.mkdir()
    arguments = ["--data", str(source), "--epochs", "1", "--batches", "128"]
    found = run_bench("large_batches.py", *arguments, cwd=beside)
    assert len(found["accuracy"]) == 8
    assert all(len(reached) == 1 for reached in found["accuracy"].values())
    assert found["keys"]["linear_warm-up_at_128"] is not None
