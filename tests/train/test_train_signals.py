"""Ctrl-C and SIGTERM: a checkpoint, the right exit code, and a resume that goes on exactly."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import scripts_interrupted_fit
import torch
from train_jobs import StopAt, data, network, quiet, trainer

import flatout
from flatout.data import WaitStopped, waits_end_when
from flatout.errors import CheckpointError, ModelError
from flatout.save.checkpoint import Checkpoints
from flatout.train.signals import Interrupted, StopSignals

pytestmark = pytest.mark.usefixtures("one_thread")

SCRIPT = Path(__file__).with_name("scripts_interrupted_fit.py")


def start(folder, *options):
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *options],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # As a terminal's shell has it: a background job may have begun with SIGINT ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def until(process, words):
    for line in process.stdout:
        if line.startswith(words):
            return
    raise AssertionError(f"{words!r} was never said: {process.stderr.read()}")


def end(process, seconds=60):
    try:
        said, errors = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return process.returncode, said, errors


def at_step(step, signum):
    return StopAt(step, lambda state: signal.raise_signal(signum))


def test_a_last_checkpoint_goes_to_a_folder_with_room(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "temporary").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    Path("runs").write_text("no folder")
    said = []
    job = trainer(network(), say=said.append)
    stop = at_step(7, signal.SIGTERM)
    with pytest.raises(Interrupted) as caught:
        job.fit(data(), batch_size=32, epochs=3, callbacks=[stop], progress=False)
    assert caught.value.checkpoint.startswith(f"{tmp_path}/temporary/flatout-runs/")
    assert "another folder is tried" in said[-2]
    # The advice of the last line works.
    run = re.search(r"run='([^']*)'", said[-1])[1]
    again = trainer(network(), run=run, say=quiet)
    later = [at_step(10_000, signal.SIGTERM)]
    again.fit(data(), batch_size=32, epochs=3, callbacks=later, resume=True, progress=False)
    assert again.history.epochs[-1]["loss"] < job.history.epochs[0]["loss"]


def test_a_run_folder_that_was_lost_is_replaced_at_the_end(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = trainer(network(), run="run", say=quiet)

    def lose(state):
        Path("run").rename("lost")  # in one call: live files are still written in it
        Path("run").write_text("no folder")
        signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Interrupted) as caught:
        job.fit(data(), batch_size=32, epochs=3, callbacks=[StopAt(7, lose)], progress=False)
    assert caught.value.checkpoint.startswith("runs/")
    assert Checkpoints(Path(caught.value.checkpoint).parent).load().step == 7


# -- in this process -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("signum", "name", "code"), [(signal.SIGINT, "^C", 130), (signal.SIGTERM, "SIGTERM", 143)]
)
def test_a_signal_ends_training_with_a_checkpoint_and_its_code(tmp_path, signum, name, code):
    said = []
    run = tmp_path / "run"
    job = trainer(network(), run=run, say=said.append)
    with pytest.raises(Interrupted) as caught:
        job.fit(data(), batch_size=32, epochs=3, callbacks=[at_step(7, signum)], progress=False)
    assert caught.value.code == code
    assert caught.value.signum == signum
    path = f"{run}/checkpoints/step-000000007"
    assert caught.value.checkpoint == path
    assert said[-1] == (
        f"{name} step 7 -> checkpoint {path}, exit {code}; "
        f"go on with Trainer(..., run='{run}').fit(..., resume=True)"
    )
    assert Checkpoints(run / "checkpoints").load().step == 7
    # What the fit had until then is not lost either.
    assert len(job.history.epochs) == 1


def test_without_a_run_folder_one_is_made_and_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = []
    job = trainer(network(), say=said.append)
    with pytest.raises(Interrupted) as caught:
        job.fit(data(), callbacks=[at_step(2, signal.SIGINT)], progress=False)
    run = re.search(r"run='(runs/[\d-]+)'", said[-1])[1]
    assert caught.value.checkpoint == f"{run}/checkpoints/step-000000002"
    resumed = trainer(network(), run=run)
    history = resumed.fit(data(), callbacks=[StopAt(0, quiet)], resume=True, progress=False)
    assert history.timeline.steps == 3


def test_handlers_are_put_back_after_any_end():
    def mine(signum, frame):
        raise AssertionError

    before = signal.signal(signal.SIGINT, mine), signal.signal(signal.SIGTERM, mine)
    try:
        trainer(network()).fit(data(), progress=False)
        assert signal.getsignal(signal.SIGINT) is signal.getsignal(signal.SIGTERM) is mine
        for failing in (StopAt(2, lambda state: 1 / 0), "no callback at all"):
            with pytest.raises((ZeroDivisionError, ModelError)):
                trainer(network()).fit(data(), callbacks=[failing], progress=False)
            assert signal.getsignal(signal.SIGINT) is signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGINT, before[0])
        signal.signal(signal.SIGTERM, before[1])


def test_what_was_ignored_stays_ignored():
    """A job behind nohup or in a background shell does not hear Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        job = trainer(network())
        history = job.fit(data(), callbacks=[at_step(2, signal.SIGINT)], progress=False)
        assert history.timeline.steps == 5
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_second_ctrl_c_does_not_wait():
    def twice(state):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        trainer(network()).fit(data(), callbacks=[StopAt(2, twice)], progress=False)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_in_a_thread_nothing_is_changed():
    seen = []

    class Look(flatout.Callback):
        def on_step(self, state):
            seen.append((signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)))

    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    def fit():
        trainer(network()).fit(data(), callbacks=[Look()], progress=False)

    thread = threading.Thread(target=fit)
    thread.start()
    thread.join()
    assert seen == [before] * 5


def test_at_a_prompt_it_is_a_keyboard_interrupt_after_the_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    said = []
    job = trainer(network(), run=tmp_path / "run", say=said.append)
    with pytest.raises(KeyboardInterrupt):
        job.fit(data(), callbacks=[at_step(2, signal.SIGINT)], progress=False)
    assert "exit" not in said[-1]
    assert Checkpoints(tmp_path / "run" / "checkpoints").load().step == 2
    # The prompt goes on with the same objects.
    history = job.fit(data(), callbacks=[StopAt(0, quiet)], resume=True, progress=False)
    assert history.timeline.steps == 3


def test_a_signal_that_comes_too_late_is_not_swallowed():
    class AtTheEnd(flatout.Callback):
        def on_fit_end(self, state):
            signal.raise_signal(signal.SIGINT)

    job = trainer(network())
    with pytest.raises(KeyboardInterrupt):
        job.fit(data(), callbacks=[AtTheEnd()], progress=False)
    assert len(job.history.epochs) == 1


def test_the_step_that_was_just_saved_is_not_saved_again(tmp_path):
    asked = StopAt(3, lambda state: state.trainer.save_checkpoint())
    job = trainer(network(), run=tmp_path / "run")
    with pytest.raises(Interrupted) as caught:
        job.fit(data(), callbacks=[asked, at_step(3, signal.SIGTERM)], progress=False)
    assert Path(caught.value.checkpoint).name == "step-000000003"
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000000003"]


def test_a_checkpoint_that_cannot_be_written_anywhere_is_reported(tmp_path, monkeypatch):
    run = tmp_path / "run"
    (tmp_path / "runs").write_text("no folder")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "flatout-runs").write_text("no folder")

    def spoil(state):
        (run / "checkpoints").rmdir()
        (run / "checkpoints").write_text("")
        signal.raise_signal(signal.SIGTERM)

    job = trainer(network(), run=run)
    with pytest.raises(CheckpointError, match=r"(?s)cannot .*flatout-runs"):
        job.fit(data(), callbacks=[StopAt(2, spoil)], progress=False)


def test_the_signals_own_class_notes_and_restores():
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals() as signals:
        assert signals.received is None
        signal.raise_signal(signal.SIGTERM)
        assert signals.received == signal.SIGTERM
        signal.raise_signal(signal.SIGTERM)  # a scheduler may send it again
    assert signal.getsignal(signal.SIGTERM) is before


# -- real processes ------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_script_that_is_interrupted_and_started_again(tmp_path, monkeypatch, capsys):
    """SIGINT while training, SIGTERM while validating, then to the end: as if undisturbed."""
    first = start(tmp_path, "run", "--wait=23")
    until(first, "training 23")
    first.send_signal(signal.SIGINT)
    code, _, errors = end(first)
    assert code == 130
    assert "flatout: ^C step 23 -> checkpoint run/checkpoints/step-000000023, exit 130" in errors
    assert "Traceback" not in errors
    second = start(tmp_path, "run", "--resume", "--slow-validation")
    until(second, "training 38")  # the last step of the second epoch
    time.sleep(0.3)
    second.send_signal(signal.SIGTERM)
    code, said, errors = end(second, 20)
    assert code == 143
    assert "evaluated" not in said
    assert "flatout: SIGTERM step 38 -> checkpoint run/checkpoints/step-000000038, exit 143" in (
        errors
    )
    third = start(tmp_path, "run", "--resume")
    code, said, errors = end(third)
    assert code == 0, errors
    assert "training 39" in said
    assert "training 38" not in said
    monkeypatch.chdir(tmp_path)
    scripts_interrupted_fit.main("whole")
    assert said.splitlines()[-1] == capsys.readouterr().out.splitlines()[-1]


@pytest.mark.slow
def test_ctrl_c_on_a_terminal_reaches_the_processes_that_read_data_too(tmp_path):
    process = start(tmp_path, "run", "--workers")
    until(process, "training 3")
    time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    code, _, errors = end(process)
    assert code == 130, errors
    assert "^C step" in errors
    assert Checkpoints(tmp_path / "run" / "checkpoints").load().step >= 3


@pytest.mark.slow
def test_a_second_ctrl_c_ends_a_script_at_once(tmp_path):
    process = start(tmp_path, "run", "--dawdle")
    until(process, "training 1")
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None  # it lets the step end, which takes a minute here
    process.send_signal(signal.SIGINT)
    code, _, errors = end(process, 20)
    assert code == -signal.SIGINT  # Python's own end by KeyboardInterrupt
    assert "KeyboardInterrupt" in errors


# -- while a pipe is silent ----------------------------------------------------------------------


ROWS = b"1 1:1 2:2\n0 1:2\n"
PIPE_SCHEMA = {
    "options": {"base": 1, "features": 2},
    "columns": [
        {"name": "label", "dtype": "int64", "role": "target"},
        {"name": "features", "dtype": "float32", "shape": [2]},
    ],
}


def piped(folder, rows, then):
    """Return a pipeline over a FIFO whose writer falls silent after some rows, and its end."""
    path = folder / "rows.fifo"
    os.mkfifo(path)

    def write():
        with open(path, "wb", buffering=0) as fifo:  # open waits for the reader
            fifo.write(ROWS * (rows // 2))
            then()
            done.wait(60)

    done = threading.Event()
    writer = threading.Thread(target=write)
    writer.start()
    made = flatout.data.fifo(path, schema=PIPE_SCHEMA, timeout_s=30).batch(16)
    return made, lambda: (done.set(), writer.join())


def pipe_job(**options):
    return trainer(torch.nn.Linear(2, 2), loss="cross_entropy", lr=0.1, **options)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_wait_for_a_pipes_first_rows(tmp_path, signum):
    class Handled(BaseException):
        pass

    def handler(number, frame):
        raise Handled

    before = signal.signal(signum, handler)
    data, stop = piped(tmp_path, 0, lambda: os.kill(os.getpid(), signum))
    try:
        with pytest.raises(Handled):
            pipe_job().fit(data, epochs=1, progress=False)
    finally:
        signal.signal(signum, before)
        stop()


def test_a_signal_ends_the_wait_for_a_pipes_next_rows_with_a_checkpoint(tmp_path):
    stepped, sent = threading.Event(), []

    def asked():  # called by the waiting thread
        if stepped.is_set() and not sent:
            sent.append(True)
            os.kill(os.getpid(), signal.SIGTERM)
        return False

    data, stop = piped(tmp_path, 40, lambda: None)
    try:
        with waits_end_when(asked), pytest.raises(Interrupted) as caught:
            pipe_job(run=tmp_path / "run").fit(
                data, epochs=1, callbacks=[StopAt(1, lambda state: stepped.set())], progress=False
            )
    finally:
        stop()
    assert caught.value.code == 143
    assert isinstance(caught.value.__context__, WaitStopped)
    assert Checkpoints(tmp_path / "run" / "checkpoints").load().step >= 1
