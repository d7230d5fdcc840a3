"""Signals that were ignored at a job's start, as with nohup, stay ignored in all its processes."""

import os
import signal
import subprocess
import sys
import time

import pytest

import flatout.processes as processes

SCRIPT = """
import os
import sys
import time

import torch

import flatout

torch.set_num_threads(1)


class Waits(flatout.Callback):
    def on_step(self, state):
        if state.step == 4:
            open(f"here-{os.environ.get('RANK', '0')}", "w").close()
            while not os.path.exists("go on"):
                time.sleep(0.05)


torch.manual_seed(0)
x, y = torch.randn(64, 4), torch.zeros(64).long()
trainer = flatout.Trainer(torch.nn.Linear(4, 2), loss="cross_entropy", allow="exact")
trainer.fit((x, y), batch_size=8, epochs=2, callbacks=[Waits()], progress=False)
print("trained to the end")
"""
IGNORED = (signal.SIGHUP, signal.SIGINT)


def ignore():
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["--devices", "2"],
        ["--devices", "2", "--servers", "1", "--set", "world.strategy=parameter_server"],
    ],
    ids=["ranks", "server"],
)
def test_a_job_that_ignores_a_hang_up_trains_to_its_end(tmp_path, options):
    (tmp_path / "train.py").write_text(SCRIPT)
    main = "from flatout.cli.main import main; main()"
    with open(tmp_path / "said", "w") as said:
        job = subprocess.Popen(
            [sys.executable, "-c", main, "run", *options, "train.py"],
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
            preexec_fn=ignore,
        )
    try:
        until = time.monotonic() + 200
        while not all((tmp_path / f"here-{rank}").exists() for rank in range(2)):
            assert job.poll() is None, (tmp_path / "said").read_text()
            assert time.monotonic() < until
            time.sleep(0.1)
        for number in IGNORED:
            os.killpg(job.pid, number)
        (tmp_path / "go on").touch()
        assert job.wait(100) == 0, (tmp_path / "said").read_text()
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
    assert "trained to the end" in (tmp_path / "said").read_text()


def test_only_signals_that_are_heeded_get_a_handler():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        heeded = processes.not_ignored(signal.SIGHUP, signal.SIGTERM)
        with processes.asked_to_end(lambda number, frame: None):
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            assert callable(signal.getsignal(signal.SIGTERM))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert heeded == [signal.SIGTERM]
