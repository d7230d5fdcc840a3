"""DataLoader workers that find no room in /dev/shm, in their own mount namespace, or are killed."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch

import flatout
from flatout.data import WaitStopped, waits_end_when
from flatout.data.sources.datasets.worker_errors import named_faults
from flatout.errors import DataError
from flatout.train.signals import Interrupted

JOB = """
import ctypes, os, sys

import torch

libc = ctypes.CDLL(None, use_errno=True)
assert libc.unshare(0x00020000) == 0  # CLONE_NEWNS
assert libc.mount(b"none", b"/", None, 16384 | 1 << 18, None) == 0  # recursive, private
assert libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=1m") == 0

import flatout
from flatout.errors import DataError
from torch.utils.data import DataLoader, Dataset

if sys.argv[2] == "full":
    with open("/dev/shm/taken", "wb", 0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass


class Large(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.zeros(250_000), 0


given = sys.argv[1]
made = DataLoader(Large(), 8, num_workers=1) if given == "loader" else Large()
workers = {"input": {"workers": 1}} if given == "dataset" else {}
trainer = flatout.Trainer(torch.nn.Linear(250_000, 2), recipe=flatout.Recipe(**workers))
try:
    trainer.fit(made, epochs=1, progress=False, **({} if given == "loader" else {"batch_size": 8}))
except DataError as error:
    print(error)
"""


@pytest.mark.root
@pytest.mark.parametrize("state", ["small", "full"])
@pytest.mark.parametrize("given", ["loader", "dataset"])
def test_shared_memory_that_is_too_small_is_named(tmp_path, given, state):
    (tmp_path / "job.py").write_text(JOB)
    command = [sys.executable, "job.py", given, state]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "/dev/shm, through which loader workers hand over their batches" in done.stdout, done
    assert "it has 1 MiB" in done.stdout
    assert "--shm-size" in done.stdout


class KillsItsWorker(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == 20 and torch.utils.data.get_worker_info():
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(4), torch.tensor(0)


def test_a_worker_that_was_killed_for_lack_of_memory_is_named():
    loader = torch.utils.data.DataLoader(KillsItsWorker(), 8, num_workers=2)
    trainer = flatout.Trainer(torch.nn.Linear(4, 2), say=lambda line: None)
    with pytest.raises(DataError, match=r"worker of the DataLoader .* SIGKILL, as the kernel does"):
        trainer.fit(loader, epochs=1, progress=False)
    # The advice of the message works.
    alone = torch.utils.data.DataLoader(KillsItsWorker(), 8, num_workers=0)
    assert len(trainer.fit(alone, epochs=1, progress=False).epochs) == 1


class Hangs(torch.utils.data.Dataset):
    """A dataset with a sample at which a worker hangs in the given way."""

    def __init__(self, how, at=20):
        self.how, self.at = how, at

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == self.at and torch.utils.data.get_worker_info():
            hang(self.how)
        return torch.zeros(4), torch.tensor(0)


def hang(how):
    if how == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "sleeps":
        time.sleep(600)
    elif how == "computes":
        while True:
            pass
    elif how == "waits for a lock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()


def sleeps_at_its_start(worker):
    hang("sleeps")


def first_line_of(loader, words="worker 0"):
    """Return the first line about a worker that contains certain words, after the workers' end."""
    said = []

    def is_said():
        return any(re.search(words, line) for line in said)

    with waits_end_when(is_said), pytest.raises(WaitStopped):
        for _ in named_faults(loader, patience_s=0.1, say=said.append):
            pass
    until = time.monotonic() + 30
    while multiprocessing.active_children():
        assert time.monotonic() < until, "a worker was left"
        time.sleep(0.01)
    return next(line for line in said if re.search(words, line))


@pytest.mark.parametrize(
    ("how", "persistent", "words"),
    [
        ("stops", True, r"is stopped \(SIGSTOP, or Ctrl-Z\); kill -CONT \d+ resumes the process"),
        ("sleeps", True, "sleeps, or waits for a lock, a file or a network"),
        ("waits for a lock", False, "sleeps, or waits for a lock, a file or a network"),
        ("computes", False, "computes"),
    ],
)
def test_a_worker_that_hangs_is_named_and_a_stop_ends_the_wait(how, persistent, words):
    loader = torch.utils.data.DataLoader(
        Hangs(how), 8, num_workers=2, persistent_workers=persistent
    )
    line = first_line_of(loader, f"which {words};")
    pid = re.search(r"worker 0 \(pid (\d+)\)", line)[1]
    assert re.match(r"waited \d+ s so far for a batch of a DataLoader by worker 0", line)
    assert f"`py-spy dump --pid {pid}` prints where it is" in line
    loader.dataset.how = ""
    assert len(list(named_faults(loader))) == 8
    loader._iterator = None


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_worker_that_hangs_at_its_start_is_named(context):
    loader = torch.utils.data.DataLoader(
        Hangs(""),
        8,
        num_workers=1,
        worker_init_fn=sleeps_at_its_start,
        multiprocessing_context=context,
    )
    assert first_line_of(loader, r"worker 0 \(pid ")


class HangsUnpickled(Hangs):
    """A dataset larger than a pipe, at which a worker hangs before it has read all."""

    def __init__(self):
        super().__init__("sleeps")
        self.first, self.content = Sleeps(), bytes(1 << 20)


class Sleeps:
    def __init__(self):
        self.is_made = True

    def __setstate__(self, state):
        hang("sleeps")


@pytest.mark.slow
@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_a_worker_that_hangs_while_it_unpickles_its_dataset_is_named(context):
    loader = torch.utils.data.DataLoader(
        HangsUnpickled(), 8, num_workers=2, multiprocessing_context=context
    )
    words = "worker 0 imports the script and unpickles the dataset"
    if context == "spawn":  # a fork server tells its worker's process later
        words += r"; it is process \d+, which (computes|sleeps)"
    line = first_line_of(loader, words)
    pids = re.findall(r"it is process (\d+)", line)
    assert not any(psutil.pid_exists(int(pid)) for pid in pids)


def test_a_worker_that_gives_a_batch_in_time_is_not_named():
    said = []
    loader = torch.utils.data.DataLoader(Hangs("sleeps", at=-1), 8, num_workers=1)
    assert len(list(named_faults(loader, patience_s=60, say=said.append))) == 8
    assert said == []


def test_a_worker_that_its_own_timeout_gives_up_is_ended():
    loader = torch.utils.data.DataLoader(Hangs("sleeps"), 8, num_workers=1, timeout=2)
    with pytest.raises(RuntimeError, match="timed out after"):
        list(named_faults(loader))
    until = time.monotonic() + 30
    while multiprocessing.active_children():
        assert time.monotonic() < until, "a worker was left"
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("trained_by", ["trainer", "keras"])
def test_a_signal_ends_a_fit_that_waits_for_a_worker(tmp_path, trained_by, signum):
    hung = tmp_path / "hung"
    loader = torch.utils.data.DataLoader(Marks(hung), 8, num_workers=1)
    sent = []

    def asked():  # called while the fit waits
        if hung.exists() and not sent:
            sent.append(True)
            os.kill(os.getpid(), signum)
        return False

    options = {"say": lambda line: None, "run": tmp_path / "run"}
    model = keras_model() if trained_by == "keras" else torch.nn.Linear(4, 2)
    quiet = {"verbose": 0} if trained_by == "keras" else {"progress": False}
    job = flatout.Trainer(model, **options)
    with waits_end_when(asked), pytest.raises(Interrupted) as caught:
        job.fit(loader, epochs=1, **quiet)
    assert caught.value.code == 128 + signum
    assert isinstance(caught.value.__context__, WaitStopped)
    assert "worker 0 (pid " in str(caught.value.__context__)
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 1


def test_a_worker_suspended_with_batches_on_their_way_is_named():
    loader = torch.utils.data.DataLoader(Hangs("sleeps", at=40), 8, num_workers=1)
    said = []
    batches = named_faults(loader, patience_s=0.5, say=said.append)
    next(batches)
    (worker,) = multiprocessing.active_children()
    os.kill(worker.pid, signal.SIGSTOP)  # torch requests the memory of each batch from this worker
    with waits_end_when(lambda: bool(said)), pytest.raises(WaitStopped):
        list(batches)
    assert f"worker 0 (pid {worker.pid}), which is stopped" in said[0]


class Marks(Hangs):
    """A dataset whose worker writes a file before it hangs."""

    def __init__(self, mark):
        super().__init__("sleeps")
        self.mark = mark

    def __getitem__(self, index):
        if index == self.at and torch.utils.data.get_worker_info():
            self.mark.touch()
        return super().__getitem__(index)


def keras_model():
    import keras

    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model
