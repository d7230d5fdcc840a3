"""Lanes that are taken out of running scripts, and what is left as it was."""

import builtins
import json
import os
import subprocess
import sys
from collections import Counter

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import forked
from flatout.observe import Call, Loader, Observation, Site
from flatout.observe.ablation import Ablations, from_lanes, judged, plan
from flatout.observe.loaders import watch_loaders
from flatout.observe.taken_out import Input, Items, KeptBatch, Log
from flatout.observe.watch import Enough, Watch
from flatout.world.place import Place

SLOW = """
import sys, time, torch
class Slow(torch.utils.data.Dataset):
    reads = 0
    def __len__(self):
        return 30
    def __getitem__(self, i):
        Slow.reads += 1
        time.sleep(0.01)
        return {"x": torch.full((4,), float(i))}
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
sizes, reads = open("sizes", "w"), open("reads", "w")
for epoch in range(10_000):
    steps = 0
    for batch in torch.utils.data.DataLoader(Slow(), 1, num_workers=int(sys.argv[1])):
        x = batch.pop("x")
        x -= x.mean()
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        time.sleep(0.0025)
        steps += 1
        if steps % 10 == 0:
            print(steps)
    print(steps, file=sizes, flush=True)
    print(Slow.reads, file=reads, flush=True)
"""

RANKS = """
import sys, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 400
    def __getitem__(self, i):
        time.sleep(0.002)
        return torch.ones(8)
loader = torch.utils.data.DataLoader(Slow(), 4)
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), 0.001)
is_on = []
while True:
    for batch in loader:
        is_on.append(int(model.require_backward_grad_sync))
        optimizer.zero_grad()
        model(batch).sum().backward()
        print(*is_on, sep="", file=open(f"sync-{dist.get_rank()}", "w"))
        optimizer.step()
"""


def _run(tmp_path, source, *arguments, options=()):
    (tmp_path / "script.py").write_text(source)
    command = ["-m", "flatout.observe.start", "seen", *options, "script.py", *arguments]
    return forked.run(command, tmp_path, _environment(), forked.TORCH)


def _environment():
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def _seen(tmp_path, rank=0):
    return Observation.of(json.loads((tmp_path / "seen" / f"rank-{rank}.json").read_text()))


@pytest.mark.slow
def test_a_script_that_waits_for_input_steps_without_reading_any(tmp_path):
    ran = _run(tmp_path, SLOW, "0", options=("--steps", "12", "--ablate", "3"))
    assert ran.returncode == 0, ran.stderr
    seen = _seen(tmp_path)

    # What was observed is of the steps before, and of nothing that came then.
    assert (seen.ended, seen.steps, len(seen.step_ms)) == ("stopped", 12, 12)
    assert sum(call.count for call in seen.calls if call.kind == "print") == 1
    found = seen.ablations["input"]
    assert found.pairs >= 2
    # An epoch has as many batches as ever, and many of them were not read.
    sizes = (tmp_path / "sizes").read_text().split()
    assert set(sizes) == {"30"}
    *_, reads = map(int, (tmp_path / "reads").read_text().split())
    assert reads < 30 * len(sizes) * 3 / 4
    assert not {path.name for path in (tmp_path / "seen").iterdir()} - {"rank-0.json"}


@pytest.mark.slow
def test_workers_fill_their_queue_meanwhile(tmp_path):
    ran = _run(tmp_path, SLOW, "2", options=("--steps", "12", "--ablate", "6"))
    assert ran.returncode == 0, ran.stderr
    assert _seen(tmp_path).ablations["input"].pairs >= 2
    assert set((tmp_path / "sizes").read_text().split()) == {"30"}


@pytest.mark.slow
def test_two_ranks_change_at_the_same_step(tmp_path):
    (tmp_path / "script.py").write_text(RANKS)
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "-m", "flatout.observe.start", "seen"),
            *("--seconds", "1", "--ablate", "4", "script.py"),
        ],
        cwd=tmp_path,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    lanes = {*_seen(tmp_path, 0).ablations}
    assert lanes == {*_seen(tmp_path, 1).ablations}
    assert lanes - {"log"} == {"input", "sync"}  # on a busy machine a print may take long enough
    first, second = ((tmp_path / f"sync-{rank}").read_text() for rank in (0, 1))
    assert first == second
    assert "0" in first


@pytest.mark.slow
def test_a_script_may_be_too_short(tmp_path):
    source = SLOW.replace("range(10_000)", "range(1)").replace("return 30", "return 3")
    _run(tmp_path, source, "0", options=("--steps", "9", "--ablate", "1"))
    seen = _seen(tmp_path)
    assert (seen.ended, seen.ablations) == ("done", {})
    assert "ablations: the script ended before anything was taken out" in seen.notes


@pytest.mark.slow
def test_a_script_that_fails_meanwhile_was_observed_all_the_same(tmp_path):
    source = SLOW.replace("steps += 1", "steps += 1\n        assert steps < 20, 'too many'")
    ran = _run(tmp_path, source, "0", options=("--steps", "9", "--ablate", "3"))
    seen = _seen(tmp_path)
    assert (ran.returncode, seen.ended, seen.error, seen.steps) == (0, "stopped", "", 9)
    assert any(note.endswith("has failed: AssertionError: too many") for note in seen.notes)


def test_blocks_are_longer_than_the_queue_and_steps_may_be_too_long():
    loader = Loader("DataLoader", num_workers=2, prefetch_factor=2)
    long = Observation([], steps=3, step_ms=[900.0] * 3, loaders=[loader])
    assert plan("input", long, 6.0) is None
    short = Observation([], steps=3, step_ms=[10.0] * 3, loaders=[loader])
    found = plan("input", short, 6.0)
    assert found.dropped == 2 * 2 + 2
    assert found.steps > 2 * 2
    assert 4 * found.pairs * (found.dropped + found.steps) * 0.01 <= 6.0


def _step_on(watch, steps, look):
    for _ in range(steps):
        if watch.lanes.lap(False):
            watch.attend()
        look()


def test_blocks_run_in_the_planned_order_and_end_the_script(tmp_path):
    watch, loud = Watch(steps=5), builtins.print
    ablations = Ablations(watch, tmp_path, Place(), 4.0)
    told = Call("print", Site("script.py", 1), count=5, seconds=1.0, steps=5)
    seen = Observation([], steps=5, step_ms=[100.0] * 5, calls=[told])
    watch.then = lambda: ablations.begin(seen)
    silent = []
    with pytest.raises(Enough):
        _step_on(watch, 1000, lambda: silent.append("ab"[builtins.print is not loud]))
    block = 2 + 3  # steps that are not counted, and as few of the others as may be

    assert builtins.print is loud
    assert ablations.notes == ["ablations: input stays in: its batches come from no DataLoader"]
    assert "".join(silent) == "a" * 8 + "".join(side * block for side in "abbaabba")
    assert ablations.results()["log"].pairs == 2
    ablations.end()
    assert not list(tmp_path.iterdir())


def test_an_epoch_in_which_batches_were_handed_out_again(monkeypatch):
    module = torch.utils.data.dataloader
    base = module._BaseDataLoaderIter
    for name in ("__init__", "__next__", "_next_index"):
        monkeypatch.setattr(base, name, getattr(base, name))
    monkeypatch.setattr(module.DataLoader, "__iter__", module.DataLoader.__iter__)
    watch = Watch()
    watch_loaders(module, watch)
    loader = DataLoader(TensorDataset(torch.arange(10.0)), 2)
    next(iter(loader))
    watch.loaders[0].in_training = True
    lane = Input(watch)
    seen = []
    for number, (batch,) in enumerate(loader):
        seen.append(batch.tolist())
        if number == 0:
            lane.take_out()
        if number == 1:
            batch += 100  # in place: the next one is as it was
        if number == 2:
            lane.put_back()
    assert seen == [[0, 1], [2, 3], [2, 3], [4, 5], [6, 7]]


def test_a_kept_batch_is_handed_out_as_it_was():
    tensor = torch.ones(3)
    kept = KeptBatch({"x": tensor, "names": ["a"]})
    for _ in range(3):
        batch = kept.again()
        batch["names"].append("b")
        batch.pop("x").mul_(2)
    assert kept.again()["names"] == ["a"]
    assert torch.equal(kept.again()["x"], torch.ones(3))


def test_print_is_silent_meanwhile_and_loud_again(capsys):
    loud, lane = builtins.print, Log(Watch())
    lane.take_out()
    print("not heard")
    lane.put_back()
    print("heard")
    assert builtins.print is loud
    assert capsys.readouterr().out == "heard\n"


def test_a_number_that_is_not_waited_for():
    lane, plain = Items(Watch(), device="cpu"), torch.Tensor.item
    lane.take_out()
    numbers = [torch.tensor(float(i)).item() for i in range(3)]
    lane.put_back()
    assert Counter(numbers) == {0.0: 3}
    assert torch.Tensor.item is plain


def test_what_blocks_and_lanes_say():
    found = judged([4.0, 4.2, 4.1, 4.0], [1.0, 1.1, 1.0, 1.1])
    assert 3.5 < found.low <= found.ratio <= found.high < 4.5
    assert 2900 < found.returns_ms < 3300
    assert judged([4.0, 4.2], [1.0, 1.1, 1.0]) is None

    seen = Observation([], steps=3, lanes_ms={"forward": 6.0, "evaluation": 4.0, "input": None})
    assert from_lanes(seen)["evaluation"].ratio == pytest.approx(10 / 6)
    assert from_lanes(seen)["evaluation"].returns_ms == 4.0
    assert "saving" not in from_lanes(seen)
