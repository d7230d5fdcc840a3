"""Cures of real scripts are tried; what wins and learns the same is prescribed, nothing is left."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest
from run_pair import run_pair

from flatout.doctor.finding import Edit, Finding
from flatout.doctor.judge import Verdict
from flatout.doctor.prove import prove
from flatout.doctor.proving.cure import NOTHING
from flatout.doctor.proving.jobs import job
from flatout.doctor.trials.scratch import remove_left, trials_folder
from flatout.observe import Loader, Observation, Optimizer

SCRIPT = """
import time
import torch
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)


class Samples(Dataset):
    def __len__(self):
        return 64_000

    def __getitem__(self, i):
        time.sleep(0.01)  # a disk that is far away
        return torch.full((8,), i / 64_000), torch.tensor([i % 2.0])


def main():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss_of = torch.nn.MSELoss()
    for epoch in range(1000):
        for x, y in DataLoader(Samples(), batch_size=16, shuffle=True):
            time.sleep(0.002)  # the model
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            print(epoch)
            open("log.txt", "a").write("step")


if __name__ == "__main__":
    main()
"""


@pytest.fixture(autouse=True)
def _in_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def edit(script: Path, has: str, after: str) -> Edit:
    lines = script.read_text().splitlines()
    at = next(at for at, line in enumerate(lines) if has in line)
    space = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
    return Edit(str(script), at + 1, lines[at], space + after)


def written(tmp_path: Path, code: str) -> Path:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(code).lstrip())
    return script


def slow(name: str, **others) -> Finding:
    return Finding("slow", "", "", name=name, **others)


def verdict(*findings: Finding, **others) -> Verdict:
    facts = {"command": ["script.py"], "steps": 50, "ended": "stopped", "usable_cpus": 1}
    loader = Loader("torch.DataLoader", num_workers=0, batches=50)
    rank = Observation(**facts | others, loaders=[loader], optimizers=[Optimizer("SGD")])
    return Verdict([rank], {}, None, list(findings), [], [])


def assert_nothing_is_left(tmp_path: Path):
    assert [one.name for one in tmp_path.iterdir() if one.name[0] != "."] == ["script.py"]
    assert list(trials_folder().glob("[!.]*")) == []
    # In no other folder do the processes of a trial run.
    below = psutil.Process().children(recursive=True)
    assert [one for one in below if one.cwd() == str(tmp_path)] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.long
def test_what_wins_and_learns_the_same_is_prescribed_and_nothing_else(tmp_path):
    script = written(tmp_path, SCRIPT)
    told: list[str] = []
    given = prove(
        verdict(
            slow("workers_zero", recipe={"input.workers": 8}, parity="redrawn"),
            slow(
                "other_loss",
                edits=(edit(script, "0.01)", "i //= 2"),),
                parity="rounding",
            ),
            slow("fails", edits=(edit(script, "zero_grad", "raise RuntimeError('boom')"),)),
            slow("batch", edits=(edit(script, "print(", "1"),), parity="changes learning"),
        ),
        ["script.py", "--max-steps", "5000"],
        budget_s=300,
        told=told.append,
    )
    assert given.stopped == ""
    proofs = {proof.names[0]: proof for proof in given.proofs}
    workers = proofs["workers_zero"]
    assert workers.outcome == "prescribed"
    assert workers.words == "workers 0 to 8"
    assert workers.trial is not None
    assert workers.parity == "bit-identical"  # as this dataset draws nothing
    assert workers.same_batches
    other = proofs["other_loss"]
    assert other.outcome == "left alone"
    assert other.reason.startswith("changes what is learned: ")
    assert other.trial is not None
    assert proofs["fails"].outcome == "left alone"
    assert proofs["fails"].reason == "with it the script failed: RuntimeError: boom"
    assert proofs["batch"].outcome == "needs your OK"
    assert proofs["batch"].trial is None
    assert given.together is not None
    assert given.together.names == ("workers_zero",)
    assert given.run_steps == 5000
    assert given.before_s is not None
    assert given.after_s is not None
    assert 0 < given.after_s < given.before_s
    assert "trying workers 0 to 8 ..." in told
    assert_nothing_is_left(tmp_path)


@pytest.mark.slow
@pytest.mark.long
def test_ctrl_c_gives_what_was_proven_until_then(tmp_path):
    script = written(tmp_path, SCRIPT)

    def interrupt(line: str) -> None:
        if line.startswith("trying second"):
            raise KeyboardInterrupt

    fast = slow("first", edits=(edit(script, "0.01)", "pass"),))
    second = slow("second", edits=(edit(script, "print(", "pass"),))
    given = prove(verdict(fast, second), ["script.py"], budget_s=300, told=interrupt)
    assert given.stopped == "stopped by Ctrl-C"
    assert [proof.outcome for proof in given.proofs] == ["prescribed", "not tried"]
    assert_nothing_is_left(tmp_path)


@pytest.mark.slow
def test_the_budget_is_kept(tmp_path):
    script = written(tmp_path, SCRIPT)
    one = slow("first", edits=(edit(script, "0.01)", "pass"),))
    given = prove(verdict(one), ["script.py"], budget_s=1)
    assert given.stopped == "the script as it is: its first step did not come in the time given"
    assert given.proofs[0].outcome == "not tried"
    assert_nothing_is_left(tmp_path)


def test_a_script_that_fails_ends_the_trials_with_its_error(tmp_path):
    written(tmp_path, "raise ValueError('no data')")
    one = slow("first", recipe={"script.zero_grad": "set_to_none"})
    given = prove(verdict(one), ["script.py"], budget_s=60)
    assert given.stopped == "the script as it is: the script failed: ValueError: no data"
    assert [(proof.outcome, proof.reason) for proof in given.proofs] == [
        ("not tried", given.stopped)
    ]
    assert given.together is None
    assert_nothing_is_left(tmp_path)


def test_without_cures_nothing_is_run(tmp_path):
    given = prove(verdict(slow("starvation")), ["there is no such script.py"])
    assert given.proofs == []
    assert given.stopped == ""
    failed = verdict(slow("w", recipe={"input.workers": 2}), ended="failed")
    given = prove(failed, ["there is no such script.py"])
    assert given.stopped == "the script failed by itself"
    assert [proof.outcome for proof in given.proofs] == ["not tried"]


@pytest.mark.slow
def test_a_killed_proof_leaves_no_process_and_the_next_removes_its_folder(tmp_path):
    script = written(tmp_path, SCRIPT)
    code = f"""
    import sys
    sys.path.insert(0, {str(Path(__file__).parent)!r})
    from test_doctor_prove import edit, prove, slow, verdict, Path
    one = slow("first", edits=(edit(Path({str(script)!r}), "0.01)", "pass"),))
    prove(verdict(one), ["script.py"], told=lambda line: print(line, flush=True))
    """
    controller = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    )
    assert controller.stdout is not None
    try:
        while not controller.stdout.readline().startswith("trying"):
            assert controller.poll() is None
        below = psutil.Process(controller.pid).children(recursive=True)
        assert below
    finally:
        os.kill(controller.pid, signal.SIGKILL)
        controller.wait()
        controller.stdout.close()
    _, alive = psutil.wait_procs(below, timeout=120)
    assert not alive
    remove_left()  # as the next trial does
    assert_nothing_is_left(tmp_path)


# -- one side of a trial -------------------------------------------------------------------------

TELLING = """
import json, sys
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
told = open(sys.argv[1], "w")
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.05)
data = TensorDataset(torch.randn(256, 4), torch.randn(256, 1))
for epoch in range(1000):
    model.train()
    for step, (x, y) in enumerate(DataLoader(data, batch_size=16, shuffle=True)):
        loss = (model(x) - y).square().mean()
        loss.backward()
        if step % 2:  # two batches to a step
            optimizer.step()
            optimizer.zero_grad()
        else:
            told.write(f"{loss.item()!r}\\n")
            told.flush()
    model.eval()
    with torch.no_grad():
        for x, y in DataLoader(data, batch_size=16):
            torch.cumsum(model(x).expand(-1, 200_000), 1)
"""


@pytest.mark.slow
def test_a_side_tells_its_losses_and_batches_and_leaves_evaluation_out(tmp_path):
    written(tmp_path, TELLING)
    results = tmp_path / "results"
    results.mkdir()
    one = job(["script.py", str(results / "losses")], NOTHING, tmp_path)
    pair = run_pair(one, one, budget_s=120, max_pairs=2, block_s=0.3, passes=[results])
    assert pair.reason == ""
    told = [float(line) for line in (results / "losses").read_text().splitlines()]
    # Both sides drew the same, and wrote to one file: the longer of the two is what it has kept.
    a, b = pair.a.losses, pair.b.losses
    least = min(len(a), len(b))
    assert a[:least] == b[:least]
    assert least > 20
    assert set(told) <= set(a) | set(b)
    trained, evaluated = pair.a.batches["0"], pair.a.batches["1"]
    assert trained[:16] != trained[16:32]  # another order in the next epoch
    assert evaluated[:16] == evaluated[16:32]
    between = sum(block.between for block in pair.blocks)
    whole = sum(block.ended - block.began for block in pair.blocks)
    assert between > whole / 2  # all but the evaluation is done in no time


@pytest.mark.slow
def test_torchruns_first_rank_takes_part(tmp_path):
    written(
        tmp_path,
        """
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        model = DistributedDataParallel(torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for step in range(100_000):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
        """,
    )
    what = ["torchrun", "--standalone", "--nproc-per-node", "2", "script.py"]
    one = job(what, NOTHING, tmp_path)
    pair = run_pair(one, one, budget_s=120, max_pairs=2, block_s=0.3)
    assert pair.reason == ""
    least = min(len(pair.a.losses), len(pair.b.losses))
    assert least > 20
    assert pair.a.losses[:least] == pair.b.losses[:least]
    assert_nothing_is_left(tmp_path)
