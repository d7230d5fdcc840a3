import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from data_made_up import MadeUp, same

from flatout.data.pipeline import Pipeline
from flatout.data.running.crew import refusal
from flatout.errors import DataError


def slow(inputs, target):
    total = sum(range(3000))
    return inputs["x"] + total, target


def noisy(inputs, target):
    return inputs["x"] + torch.rand(3) + np.random.rand(), target


def fatal(inputs, target):
    if int(inputs["x"][0]) == 33:
        os.kill(os.getpid(), signal.SIGKILL)
    return inputs["x"], target


def ended(pipeline):
    pipeline._program.crew.close()


KILLED = """
    import os, signal, sys
    sys.path.append({here!r})
    from data_made_up import MadeUp
    from test_data_crew import slow
    from flatout.data.pipeline import Pipeline

    if __name__ == "__main__":
        made = Pipeline(MadeUp(60)).map(slow).batch(8).options(processes=2)
        next(iter(made.batches(0)))
        print(*made._program.crew._pool._processes, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_processes_end_with_one_that_is_killed(tmp_path):
    script = tmp_path / "script.py"
    here = str(Path(__file__).parent)
    script.write_text(textwrap.dedent(KILLED).format(here=here))
    done = subprocess.run(
        [sys.executable, script], stdout=subprocess.PIPE, text=True, timeout=120, check=False
    )
    assert done.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    until = time.monotonic() + 60
    while any(map(psutil.pid_exists, pids)):
        assert time.monotonic() < until, "left behind"
        time.sleep(0.05)


def test_processes_make_the_same_batches_as_threads():
    made = Pipeline(MadeUp(60)).shuffle(seed=1).map(slow).batch(8)
    crew = made.options(processes=2)
    for epoch in range(2):
        assert all(map(same, crew.batches(epoch, 1), list(made.batches(epoch))[1:]))
    ended(crew)


@pytest.mark.slow
def test_processes_draw_what_this_process_would():
    made = Pipeline(MadeUp(30)).shuffle(seed=1).map(noisy).batch(8)
    crew = made.options(processes=2)
    assert all(map(same, crew.batches(1), made.batches(1)))
    ended(crew)


def test_a_process_that_dies_is_named():
    made = Pipeline(MadeUp(60)).map(fatal).batch(8).options(processes=1)
    with pytest.raises(DataError, match="a process that makes batches has died"):
        list(made.batches(0))


def test_what_cannot_be_sent_is_refused():
    made = Pipeline(MadeUp(60)).map(lambda x, y: (x["x"], y)).batch(8)
    assert "define the function at the top of a module" in refusal(made._program.maker)
    made = Pipeline(MadeUp(60)).map(slow).batch(8)
    assert refusal(made._program.maker) == ""


SCRIPT = """
import sys, time
sys.path.insert(0, {tests!r})
import torch, flatout

class Work(torch.utils.data.Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, number):
        return torch.full((4,), float(sum(range(3000)) * 0 + number)), number % 3

{guard}
    made = flatout.data.torch_dataset(Work()).shuffle(seed=1).batch(32)
    for epoch in range(8):
        count = sum(batch.size for batch in made.batches(epoch))
    print(count, made._program.crew is not None)
    print(made.notes())
"""


@pytest.mark.slow
@pytest.mark.parametrize("guarded", [True, False])
def test_python_that_threads_cannot_share_goes_to_processes_where_a_script_allows_it(
    tmp_path, guarded
):
    guard = 'if __name__ == "__main__":' if guarded else "if True:"
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parent), guard=guard))
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=200, check=True
    )
    said, notes = done.stdout.splitlines()
    assert said.startswith("4000")
    if "True" in said:
        assert guarded
        assert "forced by fetch Work" in notes
    elif not guarded and "Python" in notes:
        assert "has no `if __name__" in notes
