"""`flatout explain` on the run folder of a small fit, and on what is no run."""

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

import flatout

MAIN = "from flatout.cli.main import main; main()"


def explain(*words):
    return subprocess.run(
        [sys.executable, "-c", MAIN, "explain", *map(str, words)], capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "small"
    x = torch.randn(64, 8)
    trainer = flatout.Trainer(nn.Linear(8, 3), run=folder, say=lambda line: None)
    trainer.fit(x, x[:, :3].argmax(1), batch_size=32, epochs=2, progress=False)
    figures = json.loads((folder / "history.json").read_text())
    # As if it had run elsewhere: the tests measure no machine.
    figures["roofline"]["machine"] = "elsewhere"
    (folder / "history.json").write_text(json.dumps(figures))
    return folder


def test_a_run_is_explained_in_eighty_columns(run):
    done = explain(run)
    assert done.returncode == 0, done.stderr
    assert "chosen: " in done.stdout
    assert "roofline: " in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert explain(run / "history.json").stdout == done.stdout


def test_json_has_the_same_data(run):
    done = explain(run, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == {"tuning", "evaluation", "recipe", "features", "roofline"}
    assert found["recipe"]["values"]["compute.precision"]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"steps": 1, "lanes_ms": 2, "recipe": 3}'])
def test_a_damaged_history_is_told_with_its_file(run, tmp_path, text):
    (tmp_path / "history.json").write_text(text)
    done = explain(tmp_path)
    assert done.returncode == 1
    assert "expected the figures of a fit" in done.stderr
    assert str(tmp_path / "history.json") in done.stderr
    assert "Traceback" not in done.stderr


def test_damaged_tuning_is_told(run, tmp_path):
    figures = json.loads((run / "history.json").read_text())
    figures["tuning"] = {"done": True, "trials": [{"a": 1}]}
    (tmp_path / "h.json").write_text(json.dumps(figures))
    done = explain(tmp_path / "h.json")
    assert done.returncode == 1
    assert "expected the figures of a fit" in done.stderr


def test_a_folder_without_figures_says_what_to_name(tmp_path):
    done = explain(tmp_path)
    assert done.returncode == 1
    assert "name the run folder of a fit that has ended" in done.stderr
