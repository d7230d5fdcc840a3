import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
import typer
from torch import nn
from typer.testing import CliRunner

from flatout.cli.export import export
from flatout.errors import CheckpointError
from flatout.save.checkpoint import Checkpoints

app = typer.Typer()
app.command()(export)


def run(*args: object) -> str:
    done = CliRunner().invoke(app, [str(arg) for arg in args], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.slow
def test_says_what_was_taken_off_and_how_to_load_it(tmp_path: Path) -> None:
    state = nn.Linear(3, 2).state_dict()
    torch.save({f"module.{k}": v for k, v in state.items()} | {"epoch": 3}, tmp_path / "w.pt")
    del state["bias"]
    torch.save({f"module.{k}": v for k, v in state.items()}, tmp_path / "w.pt")
    output = run(tmp_path / "w.pt")
    assert "taken off: module." in output
    assert "1 tensors" in output
    call = next(line for line in output.splitlines() if line.startswith("load it: "))
    program = f"import safetensors.torch\nprint(list({call.removeprefix('load it: ')}))"
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, text=True
    ).stdout
    assert printed.strip() == "['weight']"


def test_from_a_run_as_json(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    Checkpoints(tmp_path / "run" / "checkpoints", asynchronous=False).save(5, model.state_dict())
    report = json.loads(run(tmp_path / "run", tmp_path / "m.safetensors", "--json"))
    assert report["tensors"] == 2
    assert report["stripped"] == []
    assert report["target"] == str(tmp_path / "m.safetensors")
    model.load_state_dict(safetensors.torch.load_file(report["target"]))


def test_prefix_and_overwrite(tmp_path: Path) -> None:
    torch.save({"net.w": torch.ones(2), "loss.w": torch.ones(1)}, tmp_path / "w.pt")
    output = run(tmp_path / "w.pt", "--prefix", "net.")
    assert "left out: loss.w" in output
    assert list(safetensors.torch.load_file(tmp_path / "w.safetensors")) == ["w"]
    with pytest.raises(CheckpointError, match="exists"):
        run(tmp_path / "w.pt")
    run(tmp_path / "w.pt", "--overwrite")
    assert len(safetensors.torch.load_file(tmp_path / "w.safetensors")) == 2


def test_a_set_of_weights_is_taken_as_advised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    two = {"generator": {"w": torch.zeros(2)}, "it's $D": {"w": torch.ones(2)}}
    torch.save(two, "a b.pth")
    with pytest.raises(CheckpointError, match="generator, it's") as caught:
        run("a b.pth")
    command = str(caught.value.do).removeprefix("take one of them: flatout export ")
    assert "it's $D is taken, not generator" in run(*shlex.split(command))
    found = safetensors.torch.load_file("plain.safetensors")
    assert torch.equal(found["w"], torch.ones(2))
    ema = {"model": two["generator"], "model_ema": two["it's $D"]}
    torch.save(ema, "ema.pth")
    assert "2 sets of weights: model is taken, not model_ema" in run("ema.pth")
    report = json.loads(run("ema.pth", "--key", "model_ema", "--overwrite", "--json"))
    assert (report["key"], report["other_keys"]) == ("model_ema", ["model"])
    assert torch.equal(safetensors.torch.load_file("ema.safetensors")["w"], torch.ones(2))


def test_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "workshop.py").write_text(
        "from torch import nn\ndef build():\n    return nn.Sequential(nn.Embedding(9, 4))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    model = nn.Sequential(nn.Embedding(9, 4))
    torch.save({"other": {"w": torch.ones(1)}, "net": model.state_dict()}, "w.pt")
    args = ["w.pt", "w.pt2", "--key", "net", "--model", "workshop:build", "--input", "2x3:int64"]
    report = json.loads(run(*args, "--json"))
    assert report["parity"] == "bit-identical"
    assert "torch.export.load" in run(*args, "--overwrite")
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert torch.equal(torch.export.load("w.pt2").module()(ids), model(ids))


@pytest.mark.parametrize(
    "args", [["w.pt", "w.pt2"], ["w.pt", "w.safetensors", "--model", "a:b"], []]
)
def test_wrong_usage(args: list[str]) -> None:
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 2


def test_help_loads_no_torch() -> None:
    program = """
import sys, typer
from typer.testing import CliRunner
from flatout.cli.export import export
app = typer.Typer()
app.command()(export)
assert CliRunner().invoke(app, ["--help"]).exit_code == 0
assert not {"torch", "numpy", "pydantic", "safetensors"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.slow
def test_a_keras_model_out_of_what_held_it(tmp_path: Path) -> None:
    """In a process that has not chosen a backend of Keras."""
    make = """
import os
os.environ["KERAS_BACKEND"] = "torch"
import keras
inner = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)], name="real")
x = keras.Input((4,))
keras.Model(x, inner(x), name="around").save("m.keras")
"""
    subprocess.run([sys.executable, "-c", make], cwd=tmp_path, check=True)
    environment = {k: v for k, v in os.environ.items() if k != "KERAS_BACKEND"}
    main = "from flatout.cli.main import main; main()"
    command = [sys.executable, "-c", main, "export", "m.keras", "plain.keras"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "taken off: around" in done.stdout
    assert "2 tensors" in done.stdout
    assert "load it: keras.saving.load_model(" in done.stdout
