"""DataLoader workers that find no room in /dev/shm, in their own mount namespace, or are killed."""

import os
import signal
import subprocess
import sys

import pytest
import torch

import flatout
from flatout.errors import DataError

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
