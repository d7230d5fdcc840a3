"""A run folder has one live job, may be removed under it, and is written without a thread."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading

import pytest
import torch
from train_jobs import StopAt, data, network, quiet, same

import flatout
from flatout.data import arrays
from flatout.devices import process
from flatout.errors import CheckpointError, DeviceError
from flatout.recipe import Process, Recipe, load
from flatout.save.checkpoint import Checkpoints
from flatout.save.in_use import InUse

pytestmark = pytest.mark.usefixtures("one_thread")


def fit(run, *, epochs=1, every=2, callbacks=(), say=quiet, **options):
    recipe = Recipe(save={"every": every})
    trainer = flatout.Trainer(network(), run=run, recipe=recipe, allow="exact", say=say)
    torch.manual_seed(1)
    given = {"epochs": epochs, "callbacks": callbacks, "progress": False, **options}
    return trainer, trainer.fit(data(), batch_size=32, **given)


class Elsewhere:
    """Another process that has a run folder, until it is killed."""

    def __init__(self, folder):
        ready, says = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            InUse(str(folder))
            os.write(says, b"!")
            threading.Event().wait()
        os.read(ready, 1)
        os.close(ready)
        os.close(says)

    def kill(self):
        os.kill(self.pid, 9)
        os.waitpid(self.pid, 0)


@pytest.mark.parametrize("resume", [False, True])
def test_a_second_job_in_a_run_folder_is_told_of_the_first(tmp_path, resume):
    if resume:
        fit(tmp_path)
    other = Elsewhere(tmp_path)
    try:
        with pytest.raises(CheckpointError) as caught:
            fit(tmp_path, epochs=2, resume=resume)
        assert f"another job runs in this folder: process {other.pid} on " in str(caught.value)
        assert "choose another run folder" in str(caught.value)
    finally:
        other.kill()
    # What a killed process has left keeps none away.
    assert len(fit(tmp_path, epochs=2, resume=resume)[1].epochs) == 2
    assert not (tmp_path / ".in-use").exists()


def test_after_an_error_a_folder_is_free(tmp_path):
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, callbacks=[StopAt(3, lambda state: 1 / 0)])
    other = Elsewhere(tmp_path)
    other.kill()
    assert len(fit(tmp_path, resume=True, callbacks=[StopAt(0, quiet)])[1].epochs) == 1


def test_a_run_folder_that_is_removed_is_made_again_and_said(tmp_path):
    run, said = tmp_path / "run", []

    def remove(state):
        state.trainer.loop.checkpoints.wait()
        shutil.rmtree(run)

    removal = StopAt(3, remove)
    trainer, history = fit(run, epochs=2, callbacks=[removal], say=said.append)
    line = f"{run} was removed while this job runs: made again, with what follows"
    assert line in said
    assert line in history.notes
    assert said.count(line) == 1
    assert load(run / "recipe.toml") == trainer.resolved
    kinds = [json.loads(row)["kind"] for row in (run / "log.jsonl").read_text().splitlines()]
    assert kinds.count("epoch") == 2
    rest, _ = fit(run, epochs=2, resume=True, callbacks=[StopAt(3, quiet)])
    assert same(rest.model, trainer.model)


def test_a_run_folder_that_another_job_has_taken_over_is_left_to_it(tmp_path):
    run, others = tmp_path / "run", []

    def take_over(state):
        state.trainer.loop.checkpoints.wait()
        shutil.rmtree(run)
        others.append(Elsewhere(run))

    try:
        with pytest.raises(CheckpointError, match="another job runs in this folder"):
            fit(run, epochs=2, callbacks=[StopAt(3, take_over)])
        assert [path.name for path in run.iterdir()] == [".in-use"]
    finally:
        for one in others:
            one.kill()


@pytest.mark.parametrize(
    "make", [os.symlink, lambda _, path: os.mkfifo(path)], ids=["link", "fifo"]
)
def test_a_lock_that_is_no_file_is_refused_and_nothing_else_written(tmp_path, make):
    """Who else writes into a shared folder could have this user empty any file of theirs."""
    other = tmp_path / "other"
    other.write_text("kept")
    make(other, tmp_path / ".in-use")
    with pytest.raises(CheckpointError, match="to be a plain file"):
        InUse(str(tmp_path))
    assert other.read_text() == "kept"


def test_a_checkpoint_is_written_where_no_thread_can_be_started(tmp_path, caplog):
    checkpoints = Checkpoints(tmp_path)
    before = threading.stack_size(2**45)  # more than there are addresses for
    try:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            threading.Thread(target=quiet).start()
        names = [checkpoints.save(step, {"a": torch.ones(3)}) for step in (1, 2)]
    finally:
        threading.stack_size(before)
    assert [checkpoints.load(name).step for name in names] == [1, 2]
    told = [r.message for r in caplog.records if "written while training waits" in r.message]
    assert len(told) == 1


@pytest.mark.parametrize("count", [100_000, 3_000_000_000])
@pytest.mark.parametrize("name", ["threads", "interop_threads"])
def test_absurd_thread_counts_are_refused(name, count):
    section = Process(**{name: count})
    words = rf"process.{name} asks for {count:,}, and this machine has .* CPUs"
    with pytest.raises(DeviceError, match=words):
        process.apply(section)
    with pytest.raises(DeviceError, match=words):
        process.environment(Recipe(process=section))


def test_absurd_numbers_of_workers_are_refused():
    source = arrays(*data())
    for name in ("threads", "processes"):
        with pytest.raises(DeviceError, match=f"options: {name} asks for 100,000"):
            source.batch(8).options(**{name: 100_000})
    trainer = flatout.Trainer(network(), recipe=Recipe(input={"workers": 100_000}), say=quiet)
    with pytest.raises(DeviceError, match=r"input.workers asks for 100,000"):
        trainer.fit(torch.utils.data.StackDataset(*data()), batch_size=8, progress=False)


def test_what_a_killed_fit_was_writing_into_the_run_folder_goes(tmp_path):
    code = "from flatout.unfinished import new_name; print(new_name())"
    name = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    left = tmp_path / "run" / name.stdout.strip()
    left.parent.mkdir()
    left.write_text("half a Recipe")
    fit(tmp_path / "run")
    assert not left.exists()
    assert (tmp_path / "run" / "recipe.toml").exists()
