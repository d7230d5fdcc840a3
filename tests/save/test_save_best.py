"""What `flatout export RUN` takes: the best weights that the run has kept, or the last."""

import json

import pytest
import safetensors.torch
import torch
import typer
from torch import nn
from typer.testing import CliRunner

import flatout
from flatout.cli.export import export as command
from flatout.errors import CheckpointError
from flatout.recipe import Recipe, Save
from flatout.save.checkpoint import Checkpoints
from flatout.save.export import export
from flatout.train.callbacks import BestCheckpoint, Callback, EarlyStopping

app = typer.Typer()
app.command()(command)


class Weights(Callback):
    """Keeps the weights after each epoch."""

    def __init__(self):
        self.after = []

    def on_epoch_end(self, state):
        self.after.append({k: v.clone() for k, v in state.model.state_dict().items()})


def fit(run, *callbacks, epochs=4, **save):
    """The validation loss grows from the first epoch on: what is validated is the opposite."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    x = torch.randn(64, 4)
    y = (x.sum(1) > 0).long()
    weights = Weights()
    trainer = flatout.Trainer(
        model,
        lr=0.05,
        metrics=["accuracy"],
        run=run,
        recipe=Recipe(save=Save(**save)),
        say=lambda _: None,
    )
    trainer.fit(
        (x, y),
        batch_size=16,
        epochs=epochs,
        validation_data=(x, 1 - y),
        callbacks=[weights, *callbacks],
        progress=False,
    )
    return weights.after


def same(path, weights):
    found = safetensors.torch.load_file(path)
    return all(torch.equal(found[name], weights[name]) for name in weights)


def run_command(*args):
    done = CliRunner().invoke(app, [str(arg) for arg in args], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


WATCHERS = {
    "BestCheckpoint, loss": lambda: BestCheckpoint("val_loss"),
    "BestCheckpoint, accuracy": lambda: BestCheckpoint("val_accuracy"),
    "EarlyStopping": lambda: EarlyStopping("val_loss", patience=9),
}


@pytest.mark.parametrize("watcher", WATCHERS.values(), ids=WATCHERS)
def test_the_best_is_taken_and_the_last_when_asked_for(tmp_path, watcher):
    after = fit(tmp_path / "run", watcher())
    assert same(export(tmp_path / "run", tmp_path / "a.safetensors").target, after[0])
    best = export(tmp_path / "run", tmp_path / "b.safetensors", which="best")
    last = export(tmp_path / "run", tmp_path / "c.safetensors", which="last")
    assert (best.which, last.which) == ("best", "last")
    assert same(best.target, after[0])
    assert same(last.target, after[-1])


def test_both_are_listed_with_their_scores(tmp_path):
    fit(tmp_path / "run", BestCheckpoint("val_accuracy"))
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    figures = [line["val_accuracy"] for line in log if "val_accuracy" in line]
    printed = run_command(tmp_path / "run")
    assert "the best is taken (--last for the other)" in printed
    assert f"best  step-000000004  val_accuracy {figures[0]:.6g}\n" in printed
    assert f"last  step-000000016  val_accuracy {figures[-1]:.6g}\n" in printed
    assert "step-000000004/model.safetensors" in printed
    printed = run_command(tmp_path / "run", "--last", "--overwrite")
    assert "the best is taken" not in printed
    assert "step-000000016/model.safetensors" in printed
    report = json.loads(run_command(tmp_path / "run", "--best", "--overwrite", "--json"))
    assert report["which"] == "best"
    assert len(report["kept"]) == 2


def test_what_early_stopping_holds_is_said(tmp_path):
    fit(tmp_path / "run", EarlyStopping("val_loss", patience=9))
    assert "best  step-000000016 (held by EarlyStopping)  val_loss " in run_command(
        tmp_path / "run"
    )


def test_nothing_is_listed_where_the_last_is_the_best(tmp_path):
    for watcher in (BestCheckpoint("loss"), EarlyStopping("loss")):
        after = fit(tmp_path / type(watcher).__name__, watcher)
        done = export(tmp_path / type(watcher).__name__, which="best")
        assert done.kept == ()
        assert same(done.target, after[-1])


def test_in_the_middle_of_an_epoch_early_stopping_holds_the_best(tmp_path):
    after = fit(tmp_path / "run", EarlyStopping("loss"), epochs=2, every=3)
    checkpoint = Checkpoints(tmp_path / "run" / "checkpoints")
    for name in ("step-000000008", "step-000000007"):
        folder = tmp_path / "run" / "checkpoints" / name
        if folder.exists():
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()
    assert checkpoint.latest() == "step-000000006"
    assert same(export(tmp_path / "run", which="best").target, after[0])


def test_where_nothing_tells_the_best(tmp_path):
    after = fit(tmp_path / "run", EarlyStopping("val_loss", patience=9, restore_best=False))
    done = export(tmp_path / "run")
    assert (done.which, done.kept) == ("last", ())
    assert same(done.target, after[-1])
    with pytest.raises(CheckpointError, match="none has a score"):
        export(tmp_path / "run", tmp_path / "b.safetensors", which="best")


def test_only_runs_have_a_best(tmp_path):
    fit(tmp_path / "run", BestCheckpoint("val_loss"))
    one = tmp_path / "run" / "checkpoints" / "step-000000004"
    for source in (one, one / "model.safetensors"):
        with pytest.raises(CheckpointError, match="expected a run with checkpoints"):
            export(source, tmp_path / "x.safetensors", which="best")
