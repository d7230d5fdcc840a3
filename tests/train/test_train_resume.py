"""A resumed fit is the undisturbed one bit for bit: weights, optimizer, figures, decisions."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics.classification import MulticlassF1Score
from train_jobs import (
    ALWAYS_TUNED,
    CLASSES,
    StopAt,
    convnet,
    data,
    figures,
    images,
    network,
    quiet,
    same,
    same_state,
    saving,
)

import flatout
from flatout.errors import CheckpointError, DataError
from flatout.recipe import Compute, Memory, Recipe, load
from flatout.save import InUse
from flatout.save.checkpoint import Checkpoints
from flatout.train.callbacks import BestCheckpoint, EarlyStopping
from flatout.train.signals import Interrupted

pytestmark = pytest.mark.usefixtures("one_thread")

KILLED = Path(__file__).with_name("scripts_killed_fit.py")


class Chance(nn.Module):
    """Draws from all three generators in training."""

    def forward(self, x):
        if not self.training:
            return x
        factor = 1 + 0.1 * random.random() + 0.1 * np.random.rand()
        return x * factor + 0.01 * torch.randn_like(x)


def model() -> nn.Module:
    return nn.Sequential(Chance(), *network())


class Noisy(Dataset):
    """Samples with an augmentation that draws."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index] + 0.1 * torch.randn(12) * random.random(), self.y[index]


def batches_of(x, y):
    return [(x[at : at + 32], y[at : at + 32]) for at in range(0, len(x), 32)]


def shuffled_by_numpy(x, y):
    def begin():
        at = torch.from_numpy(np.random.permutation(len(x)))
        yield from batches_of(x[at], y[at])

    return begin


def loader(x, y, **options):
    return DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True, **options)


SOURCES = {
    "arrays": lambda x, y: (x, y),
    "a Dataset": Noisy,
    "a DataLoader": loader,
    "a DataLoader with a generator": lambda x, y: loader(
        x, y, generator=torch.Generator().manual_seed(5)
    ),
    "a DataLoader of noise": lambda x, y: DataLoader(Noisy(x, y), batch_size=32, shuffle=True),
    "a list of batches": batches_of,
    "a function": shuffled_by_numpy,
}


class Job:
    """A fit with everything that has state."""

    def __init__(self, run=None, *, source="arrays", recipe=None, **options):
        self.said = []
        made = model()
        optimizer = torch.optim.SGD(made.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=200)
        self.trainer = flatout.Trainer(
            made,
            **{
                "optimizer": optimizer,
                "scheduler": self.scheduler,
                "metrics": {"accuracy": "accuracy", "f1": MulticlassF1Score(CLASSES)},
                "allow": "exact",
                "clip_norm": 1.0,
                "recipe": recipe or saving(keep_last=2),
                "run": run,
                "say": self.said.append,
                **options,
            },
        )
        self.source = SOURCES[source](*data())
        self.batch_size = 32 if source in ("arrays", "a Dataset") else None
        self.stopping = EarlyStopping("val_loss", patience=9)

    def fit(self, epochs=3, *, callbacks=(), resume=False, **options):
        """A fit; on resume with other random states than the first one began with."""
        seed = 99 if resume else 7
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.history = self.trainer.fit(
            self.source,
            **{
                "batch_size": self.batch_size,
                "epochs": epochs,
                "validation_data": data(seed=1),
                "callbacks": [self.stopping, *callbacks],
                "resume": resume,
                "progress": False,
                **options,
            },
        )
        return self

    def is_like(self, other):
        assert same(self.trainer.model, other.trainer.model)
        assert same_state(self.trainer.optimizer, other.trainer.optimizer)
        assert self.scheduler.state_dict() == other.scheduler.state_dict()
        assert figures(self.history) == figures(other.history)
        assert self.stopping.waited == other.stopping.waited
        assert self.stopping.best == other.stopping.best
        assert self.stopping.best_epoch == other.stopping.best_epoch


def interrupted(job, step, *callbacks, **options):
    """The job, stopped by a signal at a step."""
    at = StopAt(step, lambda state: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(Interrupted):
        job.fit(callbacks=[*callbacks, at], **options)


FEW = {
    ("arrays", 2),
    ("arrays", 5),
    ("a Dataset", 8),
    ("a DataLoader", 2),
    ("a DataLoader with a generator", 8),
    ("a list of batches", 5),
    ("a function", 8),
}


@pytest.mark.parametrize(
    ("source", "step"),
    [
        pytest.param(source, step, marks=[] if (source, step) in FEW else pytest.mark.slow)
        for source in SOURCES
        for step in (2, 5, 8)
    ],
)
def test_after_an_interruption_anywhere(tmp_path, source, step):
    """In the middle of the first epoch, at its end, in the middle of the second."""
    whole = Job(source=source).fit(callbacks=[StopAt(0, quiet)])
    run = tmp_path / "run"
    interrupted(Job(run, source=source), step)
    rest = Job(run, source=source).fit(resume=True, callbacks=[StopAt(0, quiet)])
    rest.is_like(whole)
    assert rest.history.timeline.steps == 15 - step
    resumed, changed, *advice = rest.said
    advice = [line for line in advice if not line.startswith("auto: ")]  # on a slow machine
    assert all("waiting" in line for line in advice)  # for samples that are made one by one
    assert resumed == f"resumed step {step} from step-00000000{step}, 0 samples repeated, 0 skipped"
    assert [line for line in changed.splitlines() if "callback 2" in line] == [
        "  arguments of callback 2, StopAt"
    ]
    assert changed.count("then:") == 1


@pytest.mark.slow
def test_with_processes_that_read(tmp_path):
    recipe = Recipe(input={"workers": 2})
    whole = Job(source="a Dataset", recipe=recipe).fit(callbacks=[StopAt(0, quiet)])
    interrupted(Job(tmp_path / "run", source="a Dataset", recipe=recipe), 7)
    # In this process alone the same samples are drawn.
    alone = Recipe(input={"workers": 0})
    rest = Job(tmp_path / "run", source="a Dataset", recipe=alone)
    rest.fit(resume=True, callbacks=[StopAt(0, quiet)])
    rest.is_like(whole)


@pytest.mark.parametrize("source", ["a Dataset", "a DataLoader"])
def test_again_and_again(tmp_path, source):
    whole = Job(source=source).fit(callbacks=[StopAt(0, quiet)])
    for step in (1, 4, 5, 6, 10, 14):
        interrupted(Job(tmp_path / "run", source=source), step, resume=step > 1)
    rest = Job(tmp_path / "run", source=source).fit(resume=True, callbacks=[StopAt(0, quiet)])
    rest.is_like(whole)


KINDS = {
    "accumulation, a ragged last step": {"accumulate": 2},
    "ReduceLROnPlateau": {"scheduler": lr_scheduler.ReduceLROnPlateau},
    "a sequence of schedules": {
        "scheduler": lambda o: lr_scheduler.SequentialLR(
            o,
            [lr_scheduler.LinearLR(o), lr_scheduler.CosineAnnealingWarmRestarts(o, 3)],
            milestones=[4],
        )
    },
    "schedule by epoch": {
        "scheduler": lambda o: lr_scheduler.MultiStepLR(o, [1, 2]),
        "schedule_every": "epoch",
    },
    "bf16": {"recipe": Recipe(compute=Compute(precision="bf16"))},
    "fp16 with a loss scale": {"recipe": Recipe(compute=Compute(precision="fp16"))},
    "micro-batches": {"recipe": Recipe(memory=Memory(micro_batch=7))},
    "activation checkpointing": {"recipe": Recipe(memory=Memory(activation_checkpointing="on"))},
}


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("step", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_with_every_kind_of_state(tmp_path, options, step):
    def job(run=None):
        made = model()
        optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
        made_with = {"scheduler": lambda o: lr_scheduler.ExponentialLR(o, 0.9), **options}
        return flatout.Trainer(
            made, optimizer=optimizer, metrics=["accuracy"], run=run, say=quiet, **made_with
        )

    def fit(job, seed, **more):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        return job.fit(
            data(), batch_size=32, epochs=2, validation_data=data(seed=1), progress=False, **more
        )

    stop = StopAt(step, lambda state: signal.raise_signal(signal.SIGINT))
    whole, half, rest = job(), job(tmp_path / "run"), job(tmp_path / "run")
    history = fit(whole, 7, callbacks=[StopAt(0, quiet)])
    with pytest.raises(Interrupted):
        fit(half, 7, callbacks=[stop])
    resumed = fit(rest, 99, callbacks=[StopAt(0, quiet)], resume=True)
    assert same(rest.model, whole.model)
    assert same_state(rest.optimizer, whole.optimizer)
    assert rest.scheduler.state_dict() == whole.scheduler.state_dict()
    assert figures(resumed) == figures(history)


def test_settings_are_kept_and_not_measured_again(tmp_path):

    def job():
        said = []
        recipe = Recipe(compute=Compute(compile="off"))
        made = flatout.Trainer(convnet(), recipe=recipe, run=tmp_path / "run", say=said.append)
        made.terms = replace(ALWAYS_TUNED, block_s=1e-4, most_pairs=1)
        return made, said

    x, y = images(160)
    first, said = job()
    first.fit((x, y), batch_size=2, epochs=1, progress=False)
    assert said[0].startswith("auto: ")
    assert "before all settings were tried" not in said[0]
    # What was hardly measured is not kept there.
    shutil.rmtree(os.environ["FLATOUT_CACHE"], ignore_errors=True)
    second, said = job()
    second.fit((x, y), batch_size=2, epochs=2, resume=True, progress=False)
    assert [line.partition(" ")[0] for line in said] == ["resumed", "changed"]
    assert said[1].endswith("\n  epochs\n    then: 1\n    now:  2")
    # With the reason and the measurement behind each.
    assert second.resolved == first.resolved == load(tmp_path / "run" / "recipe.toml")
    assert not Path(os.environ["FLATOUT_CACHE"], "auto").exists()


def test_a_resume_goes_on_with_unfinished_measurements(tmp_path):
    run, x = tmp_path / "run", images(160)

    def job():
        made = flatout.Trainer(convnet(), run=run, allow="exact", say=quiet)
        made.terms = ALWAYS_TUNED
        return made

    stop = StopAt(9, lambda state: signal.raise_signal(signal.SIGINT))
    with pytest.raises(Interrupted):
        job().fit(x, batch_size=2, epochs=9, progress=False, callbacks=[stop])
    assert any(c.reason == "being measured" for c in load(run / "recipe.toml").choices.values())
    rest = job()
    again = [StopAt(0, quiet)]
    history = rest.fit(x, batch_size=2, epochs=9, progress=False, callbacks=again, resume=True)
    assert history.tuning["spans"][0]["first"] == 10
    assert history.tuning["spans"][-1]["last"] == rest.loop.step_count
    assert all(c.reason != "being measured" for c in history.recipe.choices.values())


def test_what_is_asked_for_by_name_holds_on_resume(tmp_path, monkeypatch):
    run = tmp_path / "run"
    Job(run).fit(1)
    asked = Recipe(save={"every": 2}, compute={"precision": "bf16"})
    job = Job(run, recipe=asked).fit(2, resume=True)
    assert job.trainer.resolved.save.every == 2
    assert job.trainer.resolved.save.keep_last == 2
    assert job.trainer.resolved.compute.precision == "bf16"
    assert job.said[0] == (
        "settings differ from the checkpoint's: compute.precision=bf16 (was fp32), "
        "save.every=2 (was None)"
    )
    monkeypatch.setenv("FLATOUT_SET", '["save.every=3"]')
    job = Job(run, recipe=asked).fit(3, resume=True)
    assert job.trainer.resolved.save.every == 3


def test_on_another_machine_settings_are_decided_again_and_reported(tmp_path):
    run = tmp_path / "run"
    whole = Job().fit()
    Job(run).fit(1)
    newest = Checkpoints(run / "checkpoints")
    loaded = newest.load()
    here = loaded.meta["recipe"]
    cpu = next(line for line in here.splitlines() if line.startswith("cpu = "))
    elsewhere = here.replace(cpu, 'cpu = "Zuse Z4"')
    meta = {**loaded.meta, "recipe": elsewhere}
    newest.save(loaded.step, loaded.model, loaded.state, meta, own=loaded.own)
    newest.wait()
    job = Job(run).fit(resume=True)
    assert job.said[0].startswith('settings are decided again on this machine: cpu: "Zuse Z4"')
    job.is_like(whole)


def test_without_a_checkpoint_a_resume_begins(tmp_path):
    whole = Job().fit()
    torch.manual_seed(0)
    job = Job(tmp_path / "run")
    job.fit()  # with the same seeds
    job.is_like(whole)
    again = Job(tmp_path / "run").fit(resume=True)
    again.is_like(whole)
    assert again.history.timeline.steps == 0


def test_resume_may_name_a_checkpoint(tmp_path):
    run = tmp_path / "run"
    whole = Job(run, recipe=saving(keep_last=9)).fit()
    job = Job(run).fit(resume="step-000000005")
    job.is_like(whole)
    with pytest.raises(CheckpointError, match="there is no checkpoint 'step-000000099'"):
        Job(run).fit(resume="step-000000099")


def test_an_early_stop_comes_at_the_same_epoch(tmp_path):
    """With its state resumed the patience does not begin again."""

    class Worse(flatout.Callback):
        def on_evaluate_end(self, state):
            state.logs["val_loss"] = {0: 1.0, 1: 0.5}.get(state.epoch, 2.0)

    def job(run=None):
        made = Job(run)
        made.stopping = EarlyStopping("val_loss", patience=3)
        return made

    whole = job().fit(9, callbacks=[Worse(), StopAt(0, quiet)])
    assert len(whole.history.epochs) == 5
    interrupted(job(tmp_path / "run"), 18, Worse(), epochs=9)
    rest = job(tmp_path / "run").fit(9, callbacks=[Worse(), StopAt(0, quiet)], resume=True)
    assert rest.history.stop_reason == whole.history.stop_reason
    assert figures(rest.history) == figures(whole.history)
    assert same(rest.trainer.model, whole.trainer.model)  # of the best epoch, before the resume


def test_a_stop_in_the_middle_of_an_epoch_is_gone_on_from(tmp_path):
    whole = Job().fit(callbacks=[StopAt(0, quiet)])
    Job(tmp_path / "run").fit(callbacks=[StopAt(7, lambda state: state.stop("enough for today"))])
    rest = Job(tmp_path / "run").fit(resume=True, callbacks=[StopAt(0, quiet)])
    rest.is_like(whole)


def test_the_best_checkpoint_is_remembered(tmp_path):
    best = BestCheckpoint("val_accuracy")
    whole = Job(tmp_path / "whole").fit(callbacks=[best])
    run = tmp_path / "run"
    Job(run).fit(2, callbacks=[BestCheckpoint("val_accuracy")])
    resumed = BestCheckpoint("val_accuracy")
    job = Job(run).fit(resume=True, callbacks=[resumed])
    job.is_like(whole)
    assert resumed.best == best.best
    assert Path(resumed.path).name == Path(best.path).name
    assert Path(resumed.path).is_dir()


# -- what does not fit ---------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path):
    Job(tmp_path / "run").fit(1)
    return tmp_path / "run"


def refused(run, job, error, words, **options):
    """The job does not resume, and neither its model nor a checkpoint has changed."""
    before = {k: v.clone() for k, v in job.trainer.model.state_dict().items()}
    files = {p: p.read_bytes() for p in (run / "checkpoints").rglob("*") if p.is_file()}
    with pytest.raises(error) as caught:
        job.fit(resume=True, **options)
    assert words in str(caught.value)
    assert all(torch.equal(v, before[k]) for k, v in job.trainer.model.state_dict().items())
    assert {p: p.read_bytes() for p in (run / "checkpoints").rglob("*") if p.is_file()} == files


def test_another_seed_or_accumulation(run):
    refused(run, Job(run, seed=3), CheckpointError, "  seed\n    then: 0\n    now:  3\n")
    job = Job(run, accumulate=2)
    refused(run, job, CheckpointError, "  accumulate\n    then: 1\n    now:  2\n")


def test_other_data(run):
    job = Job(run)
    job.source = data(seed=2)
    refused(run, job, DataError, "training data or batch size differ")
    job.source = data(samples=140)
    refused(run, job, DataError, "now: 140 samples")


def test_another_batch_size_or_order(run):
    refused(run, Job(run), DataError, "now: 150 samples in memory", batch_size=30)
    refused(run, Job(run), DataError, "an epoch began with samples [", shuffle=False)
    refused(run, Job(run), DataError, "batches of 32, 4 an epoch", drop_last=True)


def test_another_model(run):
    job = Job(run)
    other = nn.Sequential(nn.Linear(12, 5), nn.Linear(5, CLASSES))
    job.trainer = flatout.Trainer(other, run=run, say=quiet)
    refused(run, job, CheckpointError, "the checkpoint is of another model")


def test_another_optimizer_or_schedule(run):
    adam = torch.optim.Adam
    refused(
        run, Job(run, optimizer=adam, scheduler=None), CheckpointError, "optimizer is SGD with [6]"
    )
    refused(run, Job(run, scheduler=None), CheckpointError, "then: OneCycleLR\n    now:  none")


def test_other_callbacks(run):
    job = Job(run)
    with pytest.raises(CheckpointError, match=r"then: EarlyStopping\n +now:  EarlyStopping, Sto"):
        job.fit(2, resume=True, callbacks=[StopAt(0, quiet)])
    job.stopping = BestCheckpoint("loss")
    with pytest.raises(CheckpointError, match=r"then: EarlyStopping\n +now:  BestCheckpoint"):
        job.fit(2, resume=True)
    # Nothing is lost: with the right ones it goes on.
    job = Job(run).fit(2, resume=True)
    assert job.history.timeline.steps == 5


@pytest.mark.parametrize(
    "name", ["model.safetensors", "state.safetensors", "state.json", "manifest.json"]
)
def test_a_flipped_bit_is_found_and_the_one_before_is_named(run, name):
    Job(run).fit(2, resume=True)
    file = run / "checkpoints" / "step-000000010" / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    if name == "manifest.json":  # then the folder is no whole checkpoint
        job = Job(run).fit(2, resume=True)
        assert job.history.timeline.steps == 5
        return
    refused(run, Job(run), CheckpointError, "load the previous one: step-000000005")
    job = Job(run).fit(2, resume="step-000000005")
    assert job.history.timeline.steps == 5


def test_a_loops_checkpoint_is_no_trainers(tmp_path):
    loop = flatout.Loop(run=tmp_path / "run", say=quiet)
    made = network()
    loop.prepare(made, torch.optim.Adam(made.parameters()))
    loop.save({"mine": 1})
    loop.close()
    job = flatout.Trainer(network(), run=tmp_path / "run", say=quiet)
    with pytest.raises(CheckpointError, match="written by a Loop, not by a Trainer"):
        job.fit(data(), resume=True, progress=False)


def test_a_run_folder_in_use_is_not_begun_again(run):
    """A script that is started again without resume must not mix its checkpoints with the old."""
    with pytest.raises(CheckpointError) as caught:
        Job(run).fit()
    assert "has checkpoints of an earlier fit, the newest is step-000000005" in str(caught.value)
    assert "resume=True" in str(caught.value)
    with pytest.raises(CheckpointError, match="there is no run folder"):
        Job().fit(resume=True)


def test_the_run_folder_of_a_running_job_is_reported_as_in_use(run):
    """The message must not offer to delete the checkpoints of a running job."""
    told, tells = os.pipe()
    child = os.fork()
    if not child:
        held = InUse(str(run))
        os.write(tells, b"held")
        time.sleep(600)
        held.release()
        os._exit(0)
    try:
        assert os.read(told, 4) == b"held"
        for resume in (False, True):
            with pytest.raises(CheckpointError, match=f"another job runs .*process {child}"):
                Job(run).fit(resume=resume)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with pytest.raises(CheckpointError, match="checkpoints of an earlier fit"):
        Job(run).fit()


# -- kill -9 -------------------------------------------------------------------------------------


def killed(folder, *, kills, seed, source):
    command = [sys.executable, str(KILLED), str(folder), str(kills), str(seed), source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_killed_ten_times_it_is_still_the_undisturbed_fit(tmp_path):
    result = killed(tmp_path, kills=10, seed=1, source="arrays")
    assert result["kills"] == 10
    assert result["progress"] >= 3  # kills after which there was more than before


@pytest.mark.slow
@pytest.mark.parametrize("source", ["arrays", "loader", "dataset", "frozen"])
@pytest.mark.long
def test_killed_a_hundred_times(tmp_path, source):
    result = killed(tmp_path, kills=100, seed=2, source=source)
    assert result["kills"] == 100
    assert result["progress"] >= 20
    assert result["within"] > 0  # struck while a checkpoint was being written
    # Features were kept, before and after a thaw.
    assert (result["cuts"] > 1) == (source == "frozen")
