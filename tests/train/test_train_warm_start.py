"""Warm start: weights and optimizer state are kept, steps, schedule and options begin again."""

import shutil
from pathlib import Path

import pytest
import torch
from torch.optim import lr_scheduler
from train_jobs import data, network, plain_fit, quiet, same, same_state, trainer

import flatout
from flatout.errors import CheckpointError
from flatout.save.checkpoint import Checkpoints

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def yesterday(tmp_path):
    """A finished fit: the job and its run folder."""
    job = trainer(network(), optimizer="adam", lr=1e-2, run=tmp_path / "yesterday")
    job.fit(data(), batch_size=32, epochs=2, progress=False)
    return job, tmp_path / "yesterday"


PLACES = {
    "run": lambda run: run,
    "run, as text with a slash": lambda run: f"{run}/",
    "checkpoints": lambda run: run / "checkpoints",
    "one checkpoint": lambda run: run / "checkpoints" / "step-000000010",
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_from_a_run(yesterday, place):
    job, run = yesterday
    said = []
    today = flatout.Trainer(
        network(seed=9), optimizer="adam", lr=3e-3, warm_start=place(run), say=said.append
    )
    assert same(today.model, job.model)
    assert same_state(today.optimizer, job.optimizer)
    assert [group["lr"] for group in today.optimizer.param_groups] == [3e-3]
    assert said == ["warm start from step 10: weights and optimizer kept, step and schedule reset"]


def test_from_an_older_checkpoint(yesterday):
    job, run = yesterday
    older = Checkpoints(run / "checkpoints").load("step-000000005")
    today = trainer(network(), warm_start=run / "checkpoints" / "step-000000005")
    assert all(torch.equal(v, older.model[k]) for k, v in today.model.state_dict().items())
    assert not same(today.model, job.model)


def test_the_fit_after_it_is_a_plain_loop_with_the_old_state(yesterday, tmp_path):
    job, run = yesterday
    x, y = data(seed=1)

    def cosine(optimizer):
        return lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)

    ours, theirs = network(seed=9), network(seed=9)
    today = trainer(
        ours, optimizer="adam", lr=3e-3, scheduler=cosine, warm_start=run, run=tmp_path / "today"
    )
    theirs.load_state_dict(job.model.state_dict())
    plain = torch.optim.Adam(theirs.parameters(), lr=3e-3)
    scheduler = cosine(plain)
    old = job.optimizer.state_dict()
    plain.load_state_dict({**old, "param_groups": plain.state_dict()["param_groups"]})
    torch.manual_seed(7)
    plain_fit(theirs, plain, x, y, scheduler=scheduler)
    torch.manual_seed(7)
    history = today.fit((x, y), batch_size=32, epochs=2, progress=False)
    assert same(ours, theirs)
    assert history.timeline.steps == 10
    names = sorted(p.name for p in (tmp_path / "today" / "checkpoints").iterdir())
    assert names == ["step-000000005", "step-000000010"]
    assert len(list((run / "checkpoints").iterdir())) == 2  # yesterday's are untouched


def test_from_a_model_file(yesterday, tmp_path):
    job, _ = yesterday
    said = []
    path = job.save(tmp_path / "model.safetensors")
    today = flatout.Trainer(network(seed=9), warm_start=path, say=said.append)
    assert same(today.model, job.model)
    assert not today.optimizer.state
    assert said == ["warm start: weights kept, optimizer new"]


def test_from_a_copy_elsewhere(yesterday, tmp_path, monkeypatch):
    job, run = yesterday
    shutil.copytree(run / "checkpoints", tmp_path / "copy" / "checkpoints")
    monkeypatch.chdir(tmp_path / "copy")
    for place in (Path("checkpoints"), "checkpoints/step-000000010", "."):
        assert same(trainer(network(seed=9), warm_start=place).model, job.model)


def unchanged(start, model, optimizer, words):
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=words):
        flatout.Trainer(model, optimizer=optimizer, warm_start=start, say=quiet)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_what_does_not_fit_changes_nothing(yesterday, tmp_path):
    _, run = yesterday
    unchanged(tmp_path / "nowhere", network(), "adam", "there is no checkpoint")
    unchanged(tmp_path / "no.safetensors", network(), "adam", "cannot read it")
    unchanged(run, torch.nn.Linear(3, 2), "adam", "the checkpoint is of another model")
    unchanged(run, network(), "sgd", r"optimizer is Adam with \[6\] .* found SGD with \[6\]")
    model = network()
    model[0].requires_grad_(False)
    unchanged(
        run, model, "adam", r"Adam with \[6\] parameters in its groups, found Adam with \[4\]"
    )
    weights = run / "checkpoints" / "step-000000010" / "model.safetensors"
    spoiled = bytearray(weights.read_bytes())
    spoiled[-3] ^= 4
    weights.write_bytes(spoiled)
    unchanged(run, network(), "adam", "damaged: tensor .* has sha256")
