"""`python -m flatout.cures.start` and `flatout run`: a script as `python` runs it, with cures."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = [sys.executable, "-c", "from flatout.cli.main import main; main()", "run"]
START = [sys.executable, "-m", "flatout.cures.start"]

RANKS = """
import hashlib, sys, torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 3), nn.Linear(8, 3)
    def forward(self, x, skip):
        y = self.b(self.a(x).relu())
        return y if skip else y + self.c(x)

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(Net(), find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
torch.manual_seed(rank)
for epoch in range(3):
    for step in range(11):
        x, y = torch.randn(4, 8), torch.randint(0, 3, (4,))
        skips = sys.argv[1] == "skip" and rank == 1
        (nn.functional.cross_entropy(model(x, skips), y) / 4).backward()
        if step % 4 == 3 or step == 10:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
from flatout import cures
if rank == 0:
    print([p.detach().double().sum().item() for p in model.parameters()])
    print(len(cures.applied()))
dist.destroy_process_group()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name in list(os.environ):
        if name.startswith(("FLATOUT_", "OMP_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def done(*command, **variables):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=240, check=False
    )


def test_a_dry_run_names_the_cures_and_the_command(folder) -> None:
    Path("train.py").write_text("open('started', 'w')")
    settings = ["--set", "input.workers=2", "--set", "compute.precision=bf16"]
    dry = done(*RUN, "--dry-run", *settings, "--set", "script.garbage=scheduled", "train.py", "5")
    assert dry.stderr == ("would be applied: bf16 workers=2 garbage=scheduled; undo: drop --set\n")
    assert dry.stdout.rstrip().endswith("-m flatout.cures.start train.py 5")
    assert not Path("started").exists()


def test_a_script_of_flatouts_own_is_started_as_before(folder) -> None:
    Path("train.py").write_text("import flatout\nflatout.Trainer\n")
    dry = done(*RUN, "--dry-run", "--set", "compute.precision=bf16", "train.py")
    assert "flatout.cures" not in dry.stdout
    assert "for a Trainer or Loop: precision=bf16" in dry.stderr


def test_the_script_is_run_as_python_runs_it(folder) -> None:
    Path("inner.py").write_text("def fail():\n    raise ValueError('of its own')\n")
    script = "import sys, json\nprint(json.dumps([sys.argv, sys.path[0], __name__]))\n"
    Path("train.py").write_text(script + "import inner\ninner.fail()\n")
    plain = done(sys.executable, "train.py", "a b", "-m")
    cured = done(*START, "train.py", "a b", "-m", FLATOUT_SET='["script.zero_grad=set_to_none"]')
    assert (cured.returncode, cured.stdout, cured.stderr) == (1, plain.stdout, plain.stderr)


def test_a_module_and_an_exit_code(folder) -> None:
    Path("job.py").write_text("import sys\nprint(sys.argv[1:])\nsys.exit(7)\n")
    cured = done(*START, "-m", "job", "x", FLATOUT_SET='["script.zero_grad=set_to_none"]')
    assert (cured.returncode, cured.stdout) == (7, "['x']\n")
    why = "the script imports no torch"
    assert cured.stderr == f"flatout: left as written: zero_grad=set_to_none ({why})\n"


@pytest.mark.slow
@pytest.mark.parametrize("how", [pytest.param("all", marks=pytest.mark.long), "skip"])
def test_ranks_add_up_gradients_once_a_step(folder, how) -> None:
    Path("train.py").write_text(RANKS)
    settings = ["script.gradient_sync=last_backward", "script.unused_parameters=no_search"]
    words = [word for setting in settings for word in ("--set", setting)]
    plain = done(*RUN, "--devices", "2", "train.py", how)
    cured = done(*RUN, "--devices", "2", *words, "train.py", how)
    assert plain.returncode == cured.returncode == 0, cured.stderr
    (before, none), (after, applied) = (
        map(json.loads, d.stdout.splitlines()) for d in (plain, cured)
    )
    assert after == pytest.approx(before, abs=1e-5)
    assert (none, applied) == (0, 2 if how == "all" else 1)
    told = "a parameter on another rank is unused"
    assert cured.stderr.count(told) == (0 if how == "all" else 1)


SPAWNED = """
import hashlib, multiprocessing, os, sys, torch
from torch.utils.data import DataLoader, Dataset

class Made(Dataset):
    def __len__(self):
        return 32
    def __getitem__(self, i):
        with open(f"made-{os.getpid()}", "a") as file:
            file.write(f"{i}\\n")
        return torch.full((4,), float(i)), i % 2

def main():
    multiprocessing.set_start_method(sys.argv[1])
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    loader = DataLoader(Made(), 8, shuffle=True)
    for epoch in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    print(loader.num_workers, hashlib.sha256(weights).hexdigest())

if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
def test_workers_that_are_spawned_share_the_cache(folder) -> None:
    Path("train.py").write_text(SPAWNED)
    plain = done(sys.executable, "train.py", "spawn")
    for path in folder.glob("made-*"):
        path.unlink()
    settings = ["--set", "input.workers=2", "--set", "script.cache=memory"]
    cured = done(*RUN, *settings, "train.py", "spawn")
    assert cured.returncode == 0, cured.stderr
    assert cured.stdout.split() == ["2", plain.stdout.split()[1]]
    made = sorted(len(path.read_text().split()) for path in folder.glob("made-*"))
    # The script's process tries 16 samples out, each twice; its workers make each sample once.
    assert sum(made) == 2 * 16 + 32
    assert len(made) == 3
