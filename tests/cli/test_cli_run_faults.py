"""`flatout run --devices 2`: who hangs, is slow, has bad numbers or no memory is named."""

import json
import os
import re
import signal
import textwrap
import threading
import time

import pytest
import torch
from test_cli_run_ranks import begin, finish, ranks_of

from flatout.measure import usable_cpus
from flatout.save.model_file import load_model

pytestmark = pytest.mark.skipif(usable_cpus() < 2, reason="two ranks take two CPUs")

JOB = """
    import json, os, sys, time
    import numpy as np, torch, flatout
    from torch import nn

    RANK = os.environ.get("RANK", "0")

    class NoMemory(torch.autograd.Function):
        '''Passes on what comes, but once, on rank 1, has no memory left in backward.'''
        is_next = False
        @staticmethod
        def forward(ctx, x):
            return x.clone()
        @staticmethod
        def backward(ctx, gradient):
            if NoMemory.is_next:
                NoMemory.is_next = False
                raise torch.OutOfMemoryError("no memory")
            return gradient

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            # More than a bucket holds: one is sent before memory runs out, another one is not.
            self.first, self.last = nn.Linear(20, 700), nn.Linear(700, 500)
        def forward(self, x):
            return self.last(NoMemory.apply(torch.tanh(self.first(x))))

    class Slow(flatout.Callback):
        every = 1
        def on_step(self, state):
            if RANK == "1":
                NoMemory.is_next = state.step == 4
                self.sleep(3 if state.step == 3 else 0.06 if state.epoch else 0)
        def sleep(self, seconds):
            time.sleep(seconds)

    def train(callbacks=()):
        rng = np.random.default_rng(1)
        x = rng.normal(size=(240, 20)).astype(np.float32)
        y = rng.integers(0, 500, 240)
        if "bad" in sys.argv:
            x[y.argmax()] = np.nan
            print(f"bad sample {y.argmax()}", flush=True)
        torch.manual_seed(0)
        trainer = flatout.Trainer(Model(), optimizer=torch.optim.SGD, lr=0.1, allow="exact")
        history = trainer.fit((x, y), batch_size=20, epochs=2, callbacks=callbacks)
        return trainer, history
"""

FIT = """
    trainer, history = train([Slow()])
    trainer.save("weights.safetensors")
    if RANK == "0":
        print(json.dumps([history.notes, history.lanes_by_rank]))
"""


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setenv("FLATOUT_SET", '["world.patience=1"]')


@pytest.mark.slow
def test_a_fit_outlives_a_hang_and_lack_of_memory_and_names_the_straggler(tmp_path, monkeypatch):
    code, out, error = finish(begin(tmp_path, JOB + FIT))
    assert code == 0, error
    # The hang: what is waited for, who has not come, its stack, and that it was over.
    assert error.count("has waited") == 1
    assert re.search(
        r"rank 0 has waited \d+ s in sum of gradients, bucket 1 of 2, step 4 for rank 1", error
    )
    last = r"rank 1 \(process \d+ on host \S+\) was last in sum of gradients, bucket 2 of 2"
    assert re.search(last, error)
    assert "time.sleep(seconds)" in error
    assert "all have come after" in error
    notes, lanes = json.loads(out.splitlines()[-1])
    assert "step 5: memory ran out on rank 1; its part now runs in 2 micro-batches" in notes
    (slow,) = (note for note in notes if "as long as the others" in note)
    assert re.match(r"rank 1 \(host \S+\) needs [\d.]+x as long as the others: what runs", slow)
    assert slow in error
    assert lanes[0]["sync"] > lanes[1]["sync"]
    assert lanes[1]["idle"] > lanes[0]["idle"]
    # The same weights as on one rank that had memory enough, to rounding.
    monkeypatch.chdir(tmp_path)
    job = {}
    exec(textwrap.dedent(JOB), job)
    alone, _ = job["train"]()
    found = load_model(str(tmp_path / "weights.safetensors"))
    for name, weight in alone.model.state_dict().items():
        torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_the_rank_whose_sample_is_bad_is_the_one_that_tells(tmp_path):
    code, out, error = finish(begin(tmp_path, JOB + "    train()", "bad"))
    assert code == 1, error
    sample = re.search(r"bad sample (\d+)", out)[1]
    assert error.count("Traceback (most recent call last)") == 1
    assert "NumbersError: the loss or a gradient is NaN or infinite" in error
    # In the order of this seed it is in rank 1's half of the third batch.
    assert "rank 1 of 2, step 3, learning rate 0.1\n" in error
    assert f"inputs: NaN or infinity in sample {sample}\n" in error
    assert "flatout: rank 1 of 2 has failed:" in error
    [story] = re.findall(r"Traceback.*?NumbersError", error, re.DOTALL)
    assert story.count('File "') == story.count("train.py") == 2  # the script alone


STUCK = """
    import os, signal, sys, time
    import torch
    from flatout.world import join

    world = join("cpu", float(sys.argv[2]), float(sys.argv[3]))
    world.sum(torch.ones(3), "warm-up")
    time.sleep(1)

    def gil():
        for _ in range(10):
            sum(range(10**9))  # holds Python's interpreter throughout

    def stop():
        os.kill(os.getpid(), signal.SIGSTOP)

    def sleep():
        time.sleep(1000)

    def deaf():
        signal.signal(signal.SIGTERM, lambda *_: None)
        while True:
            time.sleep(1)

    def other():
        world.gather(1)

    if world.rank == 1:
        globals()[sys.argv[1]]()
    world.sum(torch.ones(3), "my sum")
    time.sleep(1)
"""


def stuck(folder, how, timeout_s=600, patience_s=1):
    """The job, and what it has said once it has said whom it waits for."""
    job = begin(folder, STUCK, how, str(timeout_s), str(patience_s))
    said = []
    told = threading.Event()

    def read():
        for line in job.stderr:
            said.append(line)
            if "flatout:   rank 1" in line:
                told.set()

    threading.Thread(target=read, daemon=True).start()
    assert told.wait(60), "".join(said)
    return job, said


def ended(job):
    for pid in ranks_of(job).values():
        os.kill(pid, signal.SIGKILL)
    job.kill()
    job.wait(60)


@pytest.mark.slow
def test_the_stack_of_a_rank_that_holds_its_interpreter(tmp_path):
    job, said = stuck(tmp_path, "gil")
    try:
        wait_for(said, "in gil")
        assert "does not answer: some code holds its interpreter" in "".join(said)
        assert "was last in warm-up" in "".join(said)
    finally:
        ended(job)


@pytest.mark.slow
def test_a_rank_that_was_stopped_is_named_and_goes_on(tmp_path):
    job, said = stuck(tmp_path, "stop")
    pid = ranks_of(job)[1]
    assert f"is stopped (SIGSTOP, or Ctrl-Z); kill -CONT {pid} resumes the process" in "".join(said)
    os.kill(pid, signal.SIGCONT)
    assert job.wait(60) == 0
    wait_for(said, "all have come after")


@pytest.mark.slow
def test_a_hang_ends_with_the_timeout_and_the_missing_rank_named(tmp_path):
    job, said = stuck(tmp_path, "sleep", timeout_s=5)
    assert job.wait(60) == 75
    wait_for(said, "flatout: rank 0: rank 1 did not come to my sum")
    assert "Traceback" not in "".join(said)


@pytest.mark.slow
def test_a_hang_that_no_signal_ends_is_not_started_again(tmp_path):
    jobs = []
    for how in ("stop", "deaf"):  # at once, as they mostly wait
        folder = tmp_path / how
        folder.mkdir()
        job, said = stuck(folder, how, timeout_s=9, patience_s=4)
        jobs.append((job, said, ranks_of(job)[1]))
    for job, said, pid in jobs:
        assert job.wait(60) == 75
        wait_for(said, "all ranks have ended")
        text = "".join(said)
        assert "flatout: rank 0: rank 1 did not come to my sum" in text
        assert f"flatout: rank 1 (process {pid}) hung, and did not end on SIGTERM either\n" in text
        assert "start again" not in text
        assert int(re.search(r"rank 0 has waited (\d+) s in my sum for rank 1", text)[1]) >= 4


@pytest.mark.slow
def test_ranks_in_different_collectives(tmp_path):
    job, said = stuck(tmp_path, "other", timeout_s=5)
    assert job.wait(60) == 75
    wait_for(said, "all ranks have ended")
    text = "".join(said)
    assert re.search(
        r"rank 0 has waited \d+ s in my sum, while rank 1 came to another collective: "
        r"other \(.*train.py:\d+\)",
        text,
    ) or re.search(r"rank 1 has waited \d+ s in other .*, while rank 0 came to .*: my sum", text)


def wait_for(said, words):
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if words in "".join(said):
            return
        time.sleep(0.05)
    raise AssertionError("".join(said))
