import multiprocessing
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
from flatout.data.workers.process_pool import ProcessPool, refusal
from flatout.data.workers.waiting import WaitStopped, waits_end_when
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
    pipeline._program.pool.close()


KILLED = """
    import os, signal, sys
    sys.path.append({here!r})
    from data_made_up import MadeUp
    from test_data_process_pool import slow
    from flatout.data.pipeline import Pipeline

    if __name__ == "__main__":
        made = Pipeline(MadeUp(60)).map(slow).batch(8).options(processes=2)
        next(iter(made.batches(0)))
        print(*made._program.pool.pids, flush=True)
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


WITHOUT_A_TRACE = """
    import os, sys
    import torch
    import flatout

    def same(x, y):
        return x, y

    if __name__ == "__main__":
        rows = flatout.data.arrays(torch.zeros(60, 10), torch.arange(60))
        made = rows.map(same).batch(4).options(processes=2)
        batches = list(made.batches(0))
        with open("/proc/self/maps") as maps:
            mapped = maps.read()
        print(sum(len(batch.inputs) for batch in batches), "/dev/shm/torch_" in mapped)
        print(os.listdir(os.environ["TMPDIR"]))
"""


@pytest.mark.slow
def test_processes_use_nothing_that_a_kill_would_leave(tmp_path):
    script, temporary = tmp_path / "script.py", tmp_path / "temporary"
    script.write_text(textwrap.dedent(WITHOUT_A_TRACE))
    temporary.mkdir()
    places = {"TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "torch")}
    done = subprocess.run(
        [sys.executable, script],
        env={**os.environ, **places},
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == "60 False\n[]\n"
    assert os.listdir(temporary) == []


@pytest.mark.slow
def test_processes_make_the_same_batches_as_threads():
    made = Pipeline(MadeUp(60)).shuffle(seed=1).map(slow).batch(8)
    pool = made.options(processes=2)
    for epoch in range(2):
        assert all(map(same, pool.batches(epoch, 1), list(made.batches(epoch))[1:]))
    ended(pool)


@pytest.mark.slow
def test_processes_draw_what_this_process_would():
    made = Pipeline(MadeUp(30)).shuffle(seed=1).map(noisy).batch(8)
    pool = made.options(processes=2)
    assert all(map(same, pool.batches(1), made.batches(1)))
    ended(pool)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_process_that_dies_over_a_batch_is_named(processes):
    made = Pipeline(MadeUp(60)).map(fatal).batch(8).options(processes=processes)
    named = rf"worker process \d of {processes} .*SIGKILL.*making batch 4"
    with pytest.raises(DataError, match=named):
        list(made.batches(0))
    assert made._program.pool.pids == []


@pytest.mark.slow
def test_a_process_that_is_killed_between_two_batches_is_named():
    made = Pipeline(MadeUp(60)).map(slow).batch(2).options(processes=1)
    batches = made.batches(0)
    next(batches)
    (pid,) = made._program.pool.pids
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(DataError, match=rf"worker process 1 of 1 \(pid {pid}\) was killed"):
        list(batches)


DEAD_AT_IMPORT = """
    import os, signal, sys
    if __name__ == "__mp_main__":
        {death}
    import torch
    import flatout

    def same(x, y):
        return x, y

    if __name__ == "__main__":
        rows = flatout.data.arrays(torch.zeros(20_000, 10), torch.zeros(20_000))
        list(rows.map(same).batch(32).options(processes=2).batches(0))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("death", "named"),
    [
        ("os._exit(7)", "ended with exit code 7"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"),
    ],
)
def test_a_process_that_dies_while_starting_is_named(tmp_path, death, named):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(DEAD_AT_IMPORT).format(death=death))
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert named in done.stderr
    assert "while starting" in done.stderr


STUCK = """
    import os, signal, sys
    import torch
    import flatout

    def asked_to_end(number, frame):
        sys.exit(3)

    def stuck(x, y):
        if int(y) == 40:
            print(os.getpid(), flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        return x, y

    if __name__ == "__main__":
        signal.signal(signal.SIGTERM, asked_to_end)
        rows = flatout.data.arrays(torch.zeros(200, 10), torch.arange(200))
        list(rows.map(stuck).batch(4).options(processes=2).batches(0))
"""


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_signals_are_heeded_while_a_process_makes_nothing(tmp_path, number):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(STUCK))
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as job:
        stopped = int(job.stdout.readline())
        job.send_signal(number)
        _, told = job.communicate(timeout=60)
    if number == signal.SIGTERM:
        assert job.returncode == 3
    else:
        assert "KeyboardInterrupt" in told
    assert not psutil.pid_exists(stopped)


def only_here(inputs, target):
    if multiprocessing.parent_process() is not None:
        os._exit(3)
    return inputs["x"], target


@pytest.mark.slow
def test_threads_go_on_where_processes_that_were_not_asked_for_die():
    made = Pipeline(MadeUp(60)).shuffle(seed=1).map(only_here).batch(8)
    wanted = list(made.batches(0))
    program = made._program
    program.pool = ProcessPool(program.maker, 2)
    assert all(map(same, made.batches(0), wanted))
    assert program.pool is None
    assert any("threads again: worker process" in note for note in made.notes())


def complains(inputs, target):
    if int(inputs["x"][0]) == 9:
        raise Complaint(9, target)
    return inputs["x"], target


class Complaint(Exception):
    """One that cannot be made of its message alone, and so not be sent."""

    def __init__(self, number, target):
        super().__init__(f"{number} of {target}")


@pytest.mark.slow
def test_an_error_in_a_process_comes_with_its_traceback():
    made = Pipeline(MadeUp(60)).map(complains).batch(8).options(processes=1)
    with pytest.raises(DataError, match="in complains"):
        list(made.batches(0))
    ended(made)


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
    print(count, made._program.pool is not None)
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


class Sleepy:
    """Sleeps while it is unpickled, like a worker that hangs at its start."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __setstate__(self, state):
        time.sleep(state["seconds"])
        self.__dict__.update(state)


@pytest.mark.slow
def test_a_process_that_hangs_at_its_start_is_named_and_a_stop_ends_the_wait():
    pool = ProcessPool(Sleepy(600), 1)
    answers = iter([False])
    with (
        waits_end_when(lambda: next(answers, True)),
        pytest.raises(WaitStopped, match=r"worker process 1 of 1 \(pid \d+\), which is starting"),
    ):
        list(pool.batches(lambda step: (step,), 0, 1))
    assert pool.pids == []
