"""Two live processes of one script meet at step boundaries; nothing of them is left."""

import itertools
import subprocess
import sys
import textwrap
import time
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from run_pair import run_pair

from flatout.doctor.trials.arm import Arm
from flatout.doctor.trials.pair import Against
from flatout.doctor.trials.process import Command, Ended
from flatout.doctor.trials.schedule import Schedule
from flatout.doctor.trials.scratch import scratch, trials_folder

STEPPING = Path(__file__).with_name("stepping.py")
# Stands in for a training script where only the baton matters: torch takes seconds to import.
PLAIN = """
import sys, time
from flatout.doctor.trials.step_sync import at_step
for step in range(int(sys.argv[1])):
    time.sleep(0.004)
    at_step()
"""
# Likewise, by a clock that only its steps move: what is measured is exact, whatever else runs here.
TIMED = """
import sys
from flatout.doctor.trials import step_sync
from flatout.doctor.trials.step_sync import at_step
step = now = 0
step_sync.perf_counter_ns = lambda: now
for step in range(int(sys.argv[1])):
    now += round(1e9 * (0.004))
    at_step()
"""
WITH_WORKERS = """
import gc
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
data = TensorDataset(torch.randn(100_000, 8), torch.randn(100_000, 1))
batches = iter(DataLoader(data, batch_size=16, num_workers=2, prefetch_factor=3))
gc.freeze()  # they are in no list then
for x, y in batches:
    optimizer.zero_grad()
    (model(x) - y).square().mean().backward()
    optimizer.step()
    torch.save(model.state_dict(), "model.pt")
"""


def job(tmp_path: Path, code: str, *arguments: str, name: str = "script") -> Command:
    script = tmp_path / f"{name}.py"
    script.write_text(textwrap.dedent(code))
    return Command([sys.executable, str(script), *arguments])


@contextmanager
def measured_against(a: Command, seconds: float, started=lambda side, process: None):
    until = time.monotonic() + seconds
    with scratch() as folder, closing(Against(a, folder, until, started=started)) as against:
        yield against


@contextmanager
def short_script(tmp_path: Path, code: str, steps: int, most_steps: int | None = None):
    """One side of a script that ends by itself and is begun again then, past its first steps."""
    until = time.monotonic() + 60
    script = job(tmp_path, code, str(steps))
    with (
        scratch() as folder,
        closing(Arm("a", script, folder, until, most_steps=most_steps, is_renewed=True)) as side,
    ):
        side.meet()
        side.warm_up(2)
        yield side


def alive(pids: list[int]) -> list[int]:
    found = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found


def wait_until(is_so, seconds: float = 90.0) -> bool:
    until = time.monotonic() + seconds
    while not is_so() and time.monotonic() < until:
        time.sleep(0.02)
    return is_so()


@pytest.fixture(autouse=True)
def _in_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def assert_in_order(pair):
    sides = "".join(block.side for block in pair.blocks)
    assert sides == "abba" * (len(sides) // 4)
    for one, next_one in itertools.pairwise(pair.blocks):
        assert one.began < one.ended <= next_one.began
    assert len({block.steps for block in pair.blocks}) == 1


def test_two_processes_run_in_turn_a_b_b_a(tmp_path):
    same = job(tmp_path, PLAIN, "1000000")
    pair = run_pair(same, same, budget_s=60, block_s=0.1, max_pairs=2)
    assert pair.reason == ""
    assert_in_order(pair)
    assert len(pair.blocks) == 8
    assert pair.result is not None
    assert pair.result.pairs == 2
    assert pair.result.a_median > 0.004
    assert pair.cpu is not None
    assert 0 < pair.cpu.a_median < 0.002  # it waits, and computes nothing
    assert list(trials_folder().glob("[!.]*")) == []


@pytest.mark.parametrize(("slow_s", "given_up"), [(0.4, True), (0.04, False)])
def test_what_is_far_slower_is_given_up_once_its_steps_have_told_so(tmp_path, slow_s, given_up):
    a = job(tmp_path, TIMED, "1000000")
    slow = job(tmp_path, TIMED.replace("0.004", str(slow_s)), "1000000", name="slow")
    with measured_against(a, 60) as against:
        terms = Schedule(max_pairs=2, block_s=0.1, hopeless=4.0)
        pair = against.measure(slow, terms, budget_s=30)
        assert pair.reason == ("b: steps took 100.0 times as long" if given_up else "")
        assert (pair.result is None) == given_up
        again = against.measure(a, terms, budget_s=30)
        assert again.result is not None  # A goes on


@pytest.mark.slow
def test_b_may_start_as_long_as_a_did(tmp_path):
    late = job(tmp_path, "import time; time.sleep(4)\n" + PLAIN, "1000000")
    with measured_against(late, 90) as against:
        # A alone takes all of it to its first step.
        pair = against.measure(late, Schedule(max_pairs=2, block_s=0.1), budget_s=4)
    assert pair.reason == ""
    assert pair.result is not None
    assert pair.result.pairs == 2


@pytest.mark.slow
def test_a_trial_without_time_says_so(tmp_path):
    slow = job(tmp_path, PLAIN.replace("0.004", "0.2"), "1000000")
    pair = run_pair(slow, slow, budget_s=9)
    assert "proves nothing" in pair.reason or "in the time given" in pair.reason
    assert pair.result is None or not (pair.result.wins or pair.result.loses)


@pytest.mark.slow
def test_a_script_that_ends_ends_the_trial_with_what_was_measured(tmp_path):
    endless, short = job(tmp_path, PLAIN, "1000000"), job(tmp_path, PLAIN, "60")
    pair = run_pair(endless, short, budget_s=60, block_s=0.1)
    assert pair.reason == "b: the script ended by itself before the trial did"
    assert pair.result is None


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("input()", "a: the script failed: EOFError"),
        ("import os; os.kill(os.getpid(), 9)", "when memory runs out"),
        *(
            pytest.param(code, said, marks=pytest.mark.slow)
            for code, said in (
                ("raise MemoryError('no room')", "a: the script failed: MemoryError: no room"),
                ("print('no training')", "a: the script ended by itself"),
                ("import os; os.kill(os.getpid(), 15)", "a: the script was ended by SIGTERM"),
            )
        ),
    ],
)
def test_a_script_that_never_steps_is_told_plainly(tmp_path, code, said):
    one = job(tmp_path, code)
    pair = run_pair(one, one, budget_s=60, block_s=0.1)
    assert said in pair.reason
    assert pair.result is None


@pytest.mark.slow
def test_a_script_that_hangs_ends_with_the_budget(tmp_path):
    one = job(tmp_path, "import signal, time\nsignal.signal(15, signal.SIG_IGN)\ntime.sleep(600)")
    pids: list[int] = []
    pair = run_pair(one, one, budget_s=2, started=lambda side, process: pids.append(process.pid))
    assert pair.reason == "a: its first step did not come in the time given"
    assert len(pids) == 1
    assert not alive(pids)


@pytest.mark.slow
def test_a_crash_in_a_block_is_told(tmp_path):
    code = PLAIN + "    if step == 40 and sys.argv[2] == 'b': raise RuntimeError('boom')\n"
    a, b = job(tmp_path, code, "1000000", "a"), job(tmp_path, code, "1000000", "b")
    pair = run_pair(a, b, budget_s=60, block_s=0.1)
    assert pair.reason == "b: the script failed: RuntimeError: boom"


@pytest.mark.slow
def test_an_unredirected_write_ends_the_trial_even_if_the_script_goes_on(tmp_path):
    (tmp_path / "kept").write_text("kept")
    code = PLAIN.replace("    at_step()", "    at_step()\n    if step == 3: overwrite()").replace(
        "for step",
        "def overwrite():\n"
        "    import io\n"
        "    try: io.FileIO('kept', 'w')\n"
        "    except OSError: pass\n"
        "for step",
    )
    one = job(tmp_path, code, "1000000")
    pair = run_pair(one, one, budget_s=60, block_s=0.1, is_redirected=True)
    assert "a trial must not change" in pair.reason
    assert "script.py:6" in pair.reason
    assert (tmp_path / "kept").read_text() == "kept"


CONTROLLER = f"""
import os, sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from run_pair import run_pair
from flatout.doctor.trials.process import Command
script = Command([sys.executable, *sys.argv[1:]])
run_pair(script, script, budget_s=240, max_pairs=1000, block_s=0.1,
         started=lambda side, process: print(process.pid, flush=True))
"""


def killed_in_the_middle(tmp_path, command: list[str]) -> list[int]:
    """Kills a controller while one side runs and the other is stopped; returns all processes."""
    (tmp_path / "controller.py").write_text(CONTROLLER)
    controller = subprocess.Popen(
        [sys.executable, str(tmp_path / "controller.py"), *command], stdout=subprocess.PIPE
    )
    assert controller.stdout is not None
    try:
        scripts = [int(controller.stdout.readline()) for _ in range(2)]

        def is_stopped(pid):
            return psutil.Process(pid).status() == psutil.STATUS_STOPPED

        # Both have met, and change places.
        assert wait_until(lambda: is_stopped(scripts[1]))
        assert wait_until(lambda: is_stopped(scripts[0]) != is_stopped(scripts[1]))
        below = psutil.Process(controller.pid).children(recursive=True)
    finally:
        controller.kill()
        controller.wait()
        controller.stdout.close()
    return [one.pid for one in below]


def test_a_killed_controller_leaves_no_process_and_the_next_start_no_folder(tmp_path):
    script = job(tmp_path, PLAIN, "1000000")
    pids = killed_in_the_middle(tmp_path, [*script.command[1:]])
    assert len(pids) >= 4  # two scripts and their supervisors, and what these need
    assert wait_until(lambda: not alive(pids))
    assert len(list(trials_folder().glob("[!.]*"))) == 1
    pair = run_pair(job(tmp_path, "1 / 0", name="other"), script, budget_s=60, block_s=0.1)
    assert pair.reason == "a: the script failed: ZeroDivisionError: division by zero"
    assert list(trials_folder().glob("[!.]*")) == []


@pytest.mark.slow
def test_what_fills_a_cache_is_not_counted_where_it_is_unknown_how_long_it_does(tmp_path):
    filling = TIMED.replace("0.004", "0.03 if step < 20 else 0.003")
    with measured_against(job(tmp_path, TIMED, "1000000"), 60) as plain:
        for settles in (False, True):
            terms = Schedule(max_pairs=2, block_s=0.6, settles=settles)
            name = f"filling_{settles}"
            pair = plain.measure(job(tmp_path, filling, "1000000", name=name), terms, budget_s=30)
            first = next(block for block in pair.blocks if block.side == "b")
            assert (first.step_s == 0.003) is settles


@pytest.mark.parametrize("most_steps", [None, 400])
def test_what_says_that_it_keeps_more_is_not_counted_though_it_grows_no_faster(
    tmp_path, most_steps
):
    """As what must have come twice alike: all epochs until then are equally slow."""
    keeping = (
        TIMED.replace("0.004", "0.004 if step < 150 else 0.001")
        .replace("import at_step\n", "import at_step, tell_also\n")
        .replace("for step", "tell_also(lambda: 0, lambda: {'is_full': step > 150})\nfor step")
    )
    a = job(tmp_path, TIMED, str(most_steps or 1_000_000))
    b = job(tmp_path, keeping, str(most_steps or 1_000_000), name="keeping")
    with (
        scratch() as folder,
        closing(
            Against(a, folder, time.monotonic() + 60, most_steps=most_steps, is_renewed=True)
        ) as plain,
    ):
        pair = plain.measure(b, Schedule(max_pairs=2, block_s=0.1), budget_s=40)
    assert pair.reason == ""
    assert {block.step_s for block in pair.blocks if block.side == "b"} == {0.001}
    assert pair.b.warm_steps >= 150
    assert pair.b.warm_s > 145 * 0.004  # the first steps come before it


@pytest.mark.parametrize("slower_ms", [0.0, 0.02])
def test_a_script_that_grows_slower_is_restarted_before_the_next_trial(tmp_path, slower_ms):
    growing = TIMED.replace("0.004", f"0.004 + step * {slower_ms} / 1000")
    same = job(tmp_path, growing, "1000000")
    started = []
    terms = Schedule(max_pairs=2, block_s=0.25)
    with measured_against(same, 60, lambda side, process: started.append(side)) as against:
        pairs = [against.measure(same, terms, budget_s=20) for _ in range(2)]
        assert "".join(started) == ("abab" if slower_ms else "abb")
        pairs.append(against.measure(same, terms, budget_s=20, fresh=True))
        assert started[-2:] == ["a", "b"]
        started.clear()
        pairs.append(against.measure(same, replace(terms, lives=3), budget_s=20, fresh=True))
        # What it becomes is seen in one long life.
        assert "".join(started) == ("ab" if slower_ms else "abab")
    for pair in pairs:
        assert pair.reason == ""
        assert pair.result is not None
        # An old one would be twice as slow as a young one, and more.
        assert pair.result.ratio == pytest.approx(1, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(("starts_s", "settles"), [(0.2, False), (8, False), (0.2, True)])
def test_both_are_begun_several_times_where_that_takes_little(
    tmp_path, monkeypatch, starts_s, settles
):
    meet = Arm.meet

    def met(arm):
        meet(arm)
        arm._seen.started_s = starts_s

    monkeypatch.setattr(Arm, "meet", met)
    same = job(tmp_path, PLAIN, "1000000")
    terms = Schedule(max_pairs=6, min_pairs=5, block_s=0.1, precision=0.0, lives=3, settles=settles)
    started = []
    with measured_against(
        same, 150, lambda side, process: started.append((side, process.pid))
    ) as against:
        pair = against.measure(same, terms, budget_s=20 if starts_s > 1 else 100)
    assert pair.reason == ""
    assert_in_order(pair)
    # Lives of two quadruples each, unless they take too long to begin, or B fills a cache first.
    is_once = starts_s > 1 or settles
    assert "".join(side for side, _ in started) == ("ab" if is_once else "ababab")
    assert not alive([pid for _, pid in started])
    if starts_s < 1:
        assert pair.result.pairs > 4


@pytest.mark.parametrize("most_steps", [None, 150])
def test_a_script_that_ends_before_a_block_does_finds_its_pace_again(tmp_path, most_steps):
    waking = TIMED.replace("0.004", "0.01 if step < 60 else 0.002")
    with short_script(tmp_path, waking, 150, most_steps) as side:
        assert side.block(60, 60).step_s == 0.002
        assert side.block(2, 40, dropped_again=60).step_s == 0.002  # it had no 42 steps left
        assert side.block(2, 30, dropped_again=60).step_s == 0.002  # and now it has
        assert side.block(2, 40).step_s > 0.002


@pytest.mark.parametrize(("unit", "counted"), [(1, 142), (50, 100)])
def test_a_script_that_ends_within_its_first_block_counts_the_steps_it_has(tmp_path, unit, counted):
    with short_script(tmp_path, TIMED, 150) as side:
        block = side.block(100, 500, unit=unit)
        assert (block.steps, block.step_s) == (counted, 0.004)
        assert side.block(100, 40).steps == 40


def test_a_script_too_short_for_a_block_says_how_many_steps_it_takes(tmp_path):
    with short_script(tmp_path, TIMED, 8) as side:
        with pytest.raises(Ended, match="takes 8 steps only"):
            side.block(2, 40)
        assert side.has_ended


@pytest.mark.parametrize("users", [None, "7"])
def test_a_process_that_begins_again_shows_no_losses_again_and_lies_elsewhere(
    tmp_path, monkeypatch, users
):
    if users:
        monkeypatch.setenv("PYTHONHASHSEED", users)
    losses = "[] if os.environ.get('FLATOUT_RECORDED') == '0' else [1.0]"
    seed = "{'seed': os.environ.get('PYTHONHASHSEED')}"
    tells = f"lambda: {{'losses': {losses}, 'left': {seed}}}"
    showing = TIMED.replace("import at_step\n", "import at_step, tell_also\nimport os\n")
    showing = showing.replace("for step", f"tell_also(lambda: 0, {tells})\nfor step")
    with (
        scratch() as folder,
        closing(Arm("a", job(tmp_path, showing, "1000"), folder, time.monotonic() + 60)) as side,
    ):
        side.meet()
        side.warm_up(2)
        side.block(2, 5)
        assert side.showed.losses == [1.0] * 3
        assert side.showed.left == {"seed": users}
        for life in ("1", "2"):
            side.renew(2)
            side.block(2, 5)
            assert side.showed.losses == [1.0] * 3
            assert side._seen.left == {"seed": users or life}


@pytest.mark.slow
def test_a_killed_keeper_takes_its_script_along(tmp_path):
    processes = []

    def kill_its_parent(side, process):
        processes.append(process.pid)
        above = psutil.Process(process.pid).parents()
        supervisors = [one for one in above if "flatout.doctor.trials.supervisor" in one.cmdline()]
        processes.extend(one.pid for one in supervisors)
        supervisors[-1].kill()  # the others are forks of it

    same = job(tmp_path, PLAIN, "1000000")
    pair = run_pair(same, same, budget_s=60, block_s=0.1, started=kill_its_parent)
    assert pair.result is None
    assert "does not answer" in pair.reason
    assert wait_until(lambda: not alive(processes))


@pytest.mark.slow
@pytest.mark.parametrize("redirected", [None, True])
def test_a_script_is_stopped_with_its_workers(tmp_path, redirected):
    script = job(tmp_path, WITH_WORKERS)
    one = Command([script.command[0], str(STEPPING), *script.command[1:]])
    seen: list[int] = []
    states: list[str] = []

    def watch(side, process):
        seen.append(process.pid)
        if side == "b":  # a has met, and its workers have filled their queue
            a = psutil.Process(seen[0])
            workers = a.children(recursive=True)
            seen.extend(worker.pid for worker in workers)
            states.extend(one.status() for one in (a, *workers))

    pair = run_pair(
        one, one, budget_s=240, max_pairs=2, block_s=0.1, started=watch, is_redirected=redirected
    )
    assert pair.reason == ""
    assert_in_order(pair)
    assert pair.dropped == 2 * 3 + 2
    assert all(block.steps > 2 * 3 for block in pair.blocks)
    assert states == [psutil.STATUS_STOPPED] * 3
    assert not alive(seen)
    assert not (tmp_path / "model.pt").exists()


@pytest.mark.slow
def test_workers_of_a_killed_trial_die_too(tmp_path):
    script = job(tmp_path, WITH_WORKERS)
    pids = killed_in_the_middle(tmp_path, [str(STEPPING), *script.command[1:]])
    assert len(pids) >= 2 * (1 + 1 + 2)  # a supervisor, a script and its workers on either side
    assert wait_until(lambda: not alive(pids))
