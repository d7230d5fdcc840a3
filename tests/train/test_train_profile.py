"""Every run with a folder leaves a Profile and a line of history, however it ends."""

import json
import math
import sys
from importlib.metadata import version

import numpy as np
import pytest
import torch
from torch import nn
from train_jobs import StopAt, data, network, quiet
from train_ranks import run_on_two_ranks

import flatout
from flatout.data import arrays
from flatout.errors import FlatoutError
from flatout.masked import masked
from flatout.measure import LANES, Profile, profile_schema
from flatout.measure.profile import QUANTILES
from flatout.train.profiled import over_periods
from flatout.train.terms import TERMS, Terms

pytestmark = pytest.mark.usefixtures("one_thread")


def fit(run, *, epochs=2, callbacks=(), terms=TERMS, **options):
    trainer = flatout.Trainer(network(), run=run, allow="exact", say=quiet, metrics=["accuracy"])
    trainer.terms = terms
    given = {"epochs": epochs, "callbacks": callbacks, "progress": False, **options}
    return trainer, trainer.fit(data(), batch_size=32, **given)


def lines(run):
    return [json.loads(row) for row in (run / "runs.jsonl").read_text().splitlines()]


def test_a_fit_leaves_what_it_measured(tmp_path):
    trainer, history = fit(tmp_path / "run", validation_data=data())
    found = Profile.read(tmp_path / "run")
    assert (found.kind, found.state, found.error, found.resumed) == ("Trainer", "ended", None, None)
    steps = history.timeline.steps
    assert (found.steps.first, found.steps.last, found.steps.batch_size) == (1, steps, 32)
    assert found.steps.samples == history.timeline.samples
    low, mid, high = found.steps.samples_per_s
    assert low <= mid <= high
    assert mid == pytest.approx(32 * found.steps.per_s[1])
    (rank,) = found.ranks
    assert rank.lanes_ms == pytest.approx(history.lanes(), abs=1e-5)
    assert set(rank.quantiles_ms) == {*LANES[:7], "step"}
    assert all(len(of) == len(QUANTILES) and sorted(of) == of for of in rank.quantiles_ms.values())
    assert rank.use["cpus"][-1] > 0
    assert found.evaluation_s > 0
    assert found.saving_s > 0
    assert found.startup_s > 0
    assert found.model["parameters"] == sum(p.numel() for p in trainer.model.parameters())
    assert found.recipe["values"] == trainer.resolved.resolved()
    assert found.job["loss"] == "cross_entropy"
    assert found.job["optimizer 1"].startswith("Adam(lr=0.001")
    assert found.data["digest"]
    assert found.versions["torch"] == version("torch")  # torch.__version__ may add its build
    assert [one["epoch"] for one in found.epochs] == [1, 2]
    last = {name: found.epochs[-1][name] for name in history.epochs[-1]}
    assert last == pytest.approx(history.epochs[-1])
    began, ended = lines(tmp_path / "run")
    assert (began["event"], ended["event"], began["id"]) == ("began", "ended", ended["id"])
    assert (ended["state"], ended["steps"]) == ("ended", steps)
    assert ended["samples_per_s"] == mid


def test_secrets_among_the_arguments_are_in_no_file_of_the_run(tmp_path, monkeypatch):
    words = ["train.py", "--password", "hunter2", "--api-key=hunter2", "https://me:hunter2@host/a"]
    monkeypatch.setattr(sys, "argv", words)

    class Fails(flatout.Callback):
        def on_epoch_end(self, state):
            raise RuntimeError("no answer of https://me:hunter2@host/a")

    with pytest.raises(RuntimeError):
        fit(tmp_path / "run", callbacks=[Fails()])
    assert "https://me:***@host/a" in lines(tmp_path / "run")[1]["error"]
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert not [path for path in files if b"hunter2" in path.read_bytes()]
    for name in ("runs.jsonl", "profile.json"):
        assert (tmp_path / "run" / name).stat().st_mode & 0o777 == 0o600
    assert Profile.read(tmp_path / "run").command == masked(words)


def test_the_file_is_as_its_schema_says(tmp_path):
    fit(tmp_path / "run", epochs=1)
    written = json.loads((tmp_path / "run" / "profile.json").read_text())
    schema = profile_schema()
    assert set(written) == set(schema["properties"]) == set(schema["required"])
    assert written["schema"] == schema["properties"]["schema"]["const"]
    assert written["version"] == schema["properties"]["version"]["const"]


def test_a_loop_of_ones_own_leaves_one_too(tmp_path):
    model = network()
    loop = flatout.Loop(run=tmp_path / "run", say=quiet, allow="exact")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    source = arrays(*data()).batch(32)
    compute = lambda batch: nn.functional.cross_entropy(model(batch.inputs), batch.targets)  # noqa: E731
    loop.prepare(model, optimizer, compute=compute, data=source)
    for _ in loop.epochs(2):
        for batch in loop.batches(source):
            loop.step(compute, batch)
    loop.close()
    found = Profile.read(tmp_path / "run")
    assert (found.kind, found.state) == ("Loop", "ended")
    assert [one["epoch"] for one in found.epochs] == [1, 2]
    assert found.epochs[1]["loss"] < found.epochs[0]["loss"]
    assert found.data["samples"] == source.samples
    sample = sum(part[0].numel() * part.element_size() for part in data())
    assert found.input["bytes_per_sample"] == sample


def test_a_resumed_run_counts_from_where_it_went_on(tmp_path):
    _, first = fit(tmp_path / "run", epochs=1)
    fit(tmp_path / "run", epochs=3, resume=True)
    found = Profile.read(tmp_path / "run")
    before = first.timeline.steps
    assert (found.resumed.step, found.resumed.epoch) == (before, 1)
    assert found.resumed.checkpoint == f"step-{before:09d}"
    assert (found.steps.first, found.steps.last) == (before + 1, 3 * before)
    assert [one["epoch"] for one in found.epochs] == [2, 3]
    assert [one["event"] for one in lines(tmp_path / "run")] == ["began", "ended"] * 2
    # One that has nothing left to do says nothing of steps.
    fit(tmp_path / "run", epochs=3, resume=True)
    assert Profile.read(tmp_path / "run") == found


def test_a_run_that_fails_says_so_and_what_it_measured(tmp_path):
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path / "run", callbacks=[StopAt(3, lambda state: 1 / 0)])
    found = Profile.read(tmp_path / "run")
    assert (found.state, found.error, found.steps.last) == ("failed", "division by zero", 3)
    assert lines(tmp_path / "run")[-1]["state"] == "failed"


def test_numbers_that_are_not_finite_become_null(tmp_path):
    loop = flatout.Loop(run=tmp_path / "run", say=quiet, allow="exact")
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    source = arrays(*data()).batch(32)
    compute = lambda batch: model(batch.inputs).mean()  # noqa: E731
    loop.prepare(model, optimizer)
    loop.step(compute, next(loop.batches(source)))
    loop.finish_epoch({"loss": math.nan, "auc": math.inf})
    loop.close()
    (epoch,) = Profile.read(tmp_path / "run").epochs
    assert (epoch["loss"], epoch["auc"]) == (None, None)


def test_while_it_runs_it_is_there_and_whole(tmp_path, fake_clock):
    seen = []

    def look(state):
        fake_clock.sleep(40)
        seen.append((tmp_path / "run" / "profile.json").exists())

    fit(tmp_path / "run", callbacks=[StopAt(2, look), StopAt(3, look), StopAt(5, look)])
    assert seen == [False, True, True]
    assert [p.name for p in (tmp_path / "run").iterdir() if p.name.startswith(".")] == []


RANKS = """
import torch
from torch import nn

import flatout


class Clicks(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(1000, 8, sparse=True)
        self.dense = nn.Linear(8, 2)

    def forward(self, ids):
        return self.dense(self.table(ids).mean(1))


torch.manual_seed(0)
ids = torch.randint(0, 1000, (640, 3))
model = Clicks()
options = {"loss": "cross_entropy", "optimizer": "sgd", "lr": 0.1, "allow": "exact"}
trainer = flatout.Trainer(model, run="run", **options)
trainer.fit(ids, ids[:, 0] % 2, batch_size=32, epochs=2, progress=False)
"""


@pytest.mark.slow
def test_all_ranks_tell_and_what_they_send_is_known(tmp_path):
    (tmp_path / "train.py").write_text(RANKS)
    done = run_on_two_ranks(tmp_path)
    assert done.returncode == 0, done.stderr
    found = Profile.read(tmp_path / "run")
    assert [one.rank for one in found.ranks] == [0, 1]
    assert [one.steps for one in found.ranks] == [40, 40]
    assert all(one.use["cpus"] for one in found.ranks)
    assert found.ranks[0].host == found.ranks[1].host
    assert (found.world["size"], found.world["strategy"]) == (2, "ddp")
    assert found.steps.batch_size == 32  # of both ranks together
    (bucket,) = found.communication["buckets"]
    assert bucket["bytes"] >= 4 * (8 * 2 + 2)
    assert bucket["ready_ms"] > 0
    # Of 16 samples 48 ids at most; a row takes its id and 8 values.
    assert 0 < found.communication["sparse_bytes_per_step"] <= 48 * (8 + 8 * 4)
    assert found.network["interface"] == "lo"


def test_epochs_that_are_over_soon_do_not_put_it_off(tmp_path, fake_clock):
    seen = []

    class Epoch(flatout.Callback):
        def on_epoch_end(self, state):
            fake_clock.sleep(0.6)
            seen.append((tmp_path / "run" / "profile.json").exists())

    fit(tmp_path / "run", epochs=6, callbacks=[Epoch()])
    assert seen[0] is False
    assert seen[-1] is True


def test_ranks_that_average_now_and_then_tell_what_that_costs():
    ms = np.array([*[200.0] * 7, 1000.0] * 5)
    assert over_periods(ms, 8) == pytest.approx([300.0] * 33)
    assert over_periods(ms, 1) is ms
    assert over_periods(ms[:5], 8).tolist() == ms[:5].tolist()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it is no JSON"),
        ("[]", "its schema is not"),
        ('{"schema": "flatout.profile", "version": 99}', "of version 99"),
        ('{"schema": "flatout.profile", "version": 1, "run": 3}', "run: "),
    ],
)
def test_what_is_no_profile_is_refused_in_words(tmp_path, text, words):
    (tmp_path / "profile.json").write_text(text)
    with pytest.raises(FlatoutError) as caught:
        Profile.read(tmp_path)
    assert words in str(caught.value)
    assert str(tmp_path / "profile.json") in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": {"name": "Net"}}, "model.parameters is None"),
        ({"ranks": []}, "ranks are empty"),
        ({"epochs": [{"samples": "many"}]}, "epochs.samples is 'many'"),
        ({"communication": {"buckets": [{"bytes": 1}]}}, "communication.ready_ms is None"),
        ({"steps": {"first": 1}}, "steps.last: Field required"),
    ],
)
def test_what_readers_rely_on_is_checked(tmp_path, change, words):
    fit(tmp_path / "run", epochs=1)
    file = tmp_path / "run" / "profile.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(FlatoutError) as caught:
        Profile.read(tmp_path / "run")
    assert words in str(caught.value)


def test_a_folder_without_one_is_told(tmp_path):
    with pytest.raises(FlatoutError, match="cannot read a Profile: No such file"):
        Profile.read(tmp_path)


def test_steps_are_measured_by_their_size_without_a_trace(tmp_path, monkeypatch):
    plain, _ = fit(tmp_path / "plain")
    drawn = torch.get_rng_state()
    monkeypatch.setenv("FLATOUT_PROFILE_BATCHES", "1")
    measured, history = fit(tmp_path / "run", terms=Terms(visit_s=0.0, ranks_s=0.0))
    assert torch.equal(torch.get_rng_state(), drawn)
    states = zip(
        plain.model.state_dict().values(), measured.model.state_dict().values(), strict=True
    )
    assert all(torch.equal(a, b) for a, b in states)
    found = Profile.read(tmp_path / "run")
    assert found.steps.last == history.timeline.steps
    assert [one.local_batch for one in found.step_times] == [32, 16, 8, 4]
    assert all(min(one.seconds) > 0 for one in found.step_times)
    assert [one.ranks for one in found.ranks_on_host][:1] == [1]
    assert {one.local_batch for one in found.ranks_on_host} == {32}
    assert all(min(one.seconds) > 0 for one in found.ranks_on_host)
    assert not any("not measured" in note for note in found.notes)
