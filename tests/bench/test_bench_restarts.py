"""Peers are real processes here: small scripts that report made-up times."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from restarts import PEERS, Peer, PeerFailed, Row, absence, ratio, run_in_turn, run_once, versions

SCRIPT = """
import argparse, json
from pathlib import Path
parser = argparse.ArgumentParser()
for name in ("--out", "--name", "--log"):
    parser.add_argument(name)
parser.add_argument("--seconds", type=float, nargs="+")
given = parser.parse_args()
with open(given.log, "a") as log:
    log.write(given.name + "\\n")
note = "cwd " + str(Path.cwd())
report = {"epoch_seconds": given.seconds, "steps": 10, "accuracy": 0.5, "note": note}
Path(given.out).write_text(json.dumps(report))
"""


@pytest.fixture
def make_peer(tmp_path):
    script = tmp_path / "peer.py"
    script.write_text(SCRIPT)

    def make(name, *seconds, needs=()):
        arguments = ["--name", name, "--log", str(tmp_path / "log")]
        arguments += ["--seconds", *map(str, seconds)]
        return Peer(name, str(script), tuple(arguments), needs)

    return make


@pytest.fixture
def failing(tmp_path):
    script = tmp_path / "failing.py"
    script.write_text(f"open({str(tmp_path / 'log')!r}, 'a').write('failing\\n')\n1 / 0\n")
    return Peer("failing", str(script))


def silent(line):
    """No one listens."""


def test_a_step_is_the_median_epoch_divided_by_its_steps(make_peer):
    rows = run_in_turn([make_peer("one", 4.0, 2.0, 9.0)], restarts=3, tell=silent)
    assert rows["one"].seconds == [0.4, 0.4, 0.4]
    assert rows["one"].accuracies == [0.5, 0.5, 0.5]
    assert rows["one"].measured


def test_peers_take_turns_and_every_other_round_runs_backwards(make_peer, tmp_path):
    peers = [make_peer(name, 1.0) for name in "abc"]
    said = []
    run_in_turn(peers, restarts=3, tell=said.append)
    assert (tmp_path / "log").read_text().split() == list("abccbaabc")
    assert said[0] == "1/3 a: 100,000 us/step"
    assert len(said) == 9


def test_a_process_runs_in_a_folder_of_its_own_that_is_gone_afterwards(make_peer, tmp_path):
    notes = {run_once(make_peer("one", 1.0))["note"] for _ in range(2)}
    assert len(notes) == 2
    assert all("flatout-bench-" in note for note in notes)
    assert not any((tmp_path / note.removeprefix("cwd ")).exists() for note in notes)


def test_an_absent_peer_is_reported_and_never_started(make_peer, tmp_path):
    absent = make_peer("absent", 1.0, needs=("json", "no_such_module_here"))
    assert absence(absent) == "absent: no_such_module_here is not installed"
    rows = run_in_turn([absent, make_peer("here", 1.0)], restarts=2, tell=silent)
    assert rows["absent"].reason == "absent: no_such_module_here is not installed"
    assert not rows["absent"].measured
    assert (tmp_path / "log").read_text().split() == ["here", "here"]


def test_a_peer_that_fails_is_reported_and_costs_the_others_nothing(make_peer, failing, tmp_path):
    rows = run_in_turn([failing, make_peer("here", 1.0)], restarts=2, tell=silent)
    assert rows["failing"].reason == "failed: ZeroDivisionError: division by zero"
    assert len(rows["here"].seconds) == 2
    assert (tmp_path / "log").read_text().split() == ["failing", "here", "here"]


def test_a_peer_that_reports_nothing_has_failed(tmp_path):
    script = tmp_path / "silent.py"
    script.write_text("print('nothing to report')")
    with pytest.raises(PeerFailed, match=r"^nothing to report$"):
        run_once(Peer("silent", str(script)))


def test_only_leaves_out_the_others_and_says_so(make_peer):
    peers = [make_peer("a", 1.0), make_peer("b", 1.0)]
    rows = run_in_turn(peers, restarts=1, only=["b"], tell=silent)
    assert rows["a"].reason == "left out by --only"
    assert rows["b"].measured


def test_a_ratio_is_slower_over_faster_with_its_interval(make_peer):
    peers = [make_peer("slow", 3.0), make_peer("fast", 1.5)]
    rows = run_in_turn(peers, restarts=1, tell=silent)
    rows["slow"].seconds = [0.30, 0.33, 0.27]
    rows["fast"].seconds = [0.15, 0.14, 0.16]
    found = ratio(rows, "slow", "fast")
    assert found.mid == pytest.approx(2.0)
    assert 0.27 / 0.16 <= found.low < 2.0 < found.high <= 0.33 / 0.14
    assert ratio(rows, "fast", "fast").mid == pytest.approx(1.0)


def test_a_ratio_to_what_was_not_measured_is_the_reason(make_peer):
    peers = [make_peer("a", 1.0), make_peer("b", 1.0, needs=("no_such_module_here",))]
    rows = run_in_turn(peers, restarts=1, tell=silent)
    expected = "b: absent: no_such_module_here is not installed"
    assert ratio(rows, "a", "b") == ratio(rows, "b", "a") == expected


def test_versions_name_what_is_installed_and_nothing_else():
    found = versions([Peer("a", "a.py", needs=("numpy", "no_such_module_here", "torch"))])
    assert list(found) == ["numpy", "torch"]
    assert json.dumps(found)
    assert found["numpy"].count(".") >= 1


def test_a_time_that_noise_has_made_negative_is_a_reason(make_peer):
    rows = {name: Row(make_peer(name, 1.0), seconds=[1.0]) for name in "ab"}
    rows["b"].seconds = [-5.9e-7]
    assert "a time of -5.9e-07 s is a difference made negative by noise" in ratio(rows, "a", "b")


LIMITED = """
import argparse, json, sys
sys.path.insert(0, sys.argv.pop(1))
from restarts import Peer, run_in_turn
from results import Key, Results, add_arguments, finish, lines_of
parser = argparse.ArgumentParser()
add_arguments(parser, restarts=3)
script, pid = sys.argv.pop(1), sys.argv.pop(1)
given = parser.parse_args()
peers = [Peer(name, script, (pid, name)) for name in ("fast", "slow")]
rows = run_in_turn(peers, restarts=given.restarts, tell=lambda line: print(line, flush=True))
lines = lines_of(rows, "fast", str)
keys = [Key("fast", rows["fast"].seconds[0]), Key("slow", rows["slow"].reason or 1.0)]
sys.exit(finish(Results("t", ["", "", "", "", "", ""], lines, [], keys, {}), given))
"""
PAIR = """
import json, os, sys, time
name = sys.argv[-1]
if name == "slow":
    open(sys.argv[-2], "w").write(str(os.getpid()))
    time.sleep(600)
report = {"epoch_seconds": [1.0], "steps": 1, "note": ""}
open(sys.argv[sys.argv.index("--out") + 1], "w").write(json.dumps(report))
"""


def limited(folder, *options):
    """Start a bench of a fast peer and a slow peer, of which the slow peer writes its pid."""
    bench, file = str(Path(PEERS).parent), folder / "found.json"
    words = [bench, str(folder / "pair.py"), str(folder / "pid"), "--json", str(file), *options]
    return subprocess.Popen(
        [sys.executable, "-c", LIMITED, *words], stdout=subprocess.PIPE, text=True
    ), file


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [
        pytest.param(None, 0, "the time of --minutes was over", marks=pytest.mark.slow),
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, 143, "ended by SIGTERM"),
    ],
)
def test_a_bench_that_ends_early_shows_and_writes_its_measurements(tmp_path, number, code, words):
    (tmp_path / "pair.py").write_text(PAIR)
    running, file = limited(tmp_path, *([] if number else ["--minutes", "0.15"]))
    pid = tmp_path / "pid"
    assert running.stdout.readline().startswith("1/3 fast: ")
    (kept,) = (tmp_path / "found.json.part").read_text().splitlines()
    assert json.loads(kept)["epoch_seconds"] == [1.0]
    wait_for(lambda: pid.exists() and pid.read_text())
    if number:
        running.send_signal(number)
    said, _ = running.communicate(timeout=120)
    assert running.returncode == code
    assert not Path("/proc", pid.read_text()).exists()
    assert f"{words}: these are the results until then" in said
    assert "fast 1" in said
    assert f"slow not measured ({words})" in said
    found = json.loads(file.read_text())
    assert found["keys"] == {"fast": 1.0, "slow": None}
    assert [one["peer"] for one in found["measured"]] == ["fast"]
    assert not (tmp_path / "found.json.part").exists()


PARTS = """
import argparse, signal, sys
sys.path.insert(0, sys.argv.pop(1))
from statistics import median
from restarts import each, tell
from results import Key, Results, add_arguments, figure, finish, over_rows
parser = argparse.ArgumentParser()
add_arguments(parser, restarts=1)
given = parser.parse_args()
def measure(part):
    tell(f"now {part}")
    if part == "interrupted":
        signal.raise_signal(signal.SIGINT)
    return {"ms": 1 / (part != "failing")}
parts = ["right", "failing", "right again", "interrupted", "never begun"]
rows = each(parts, measure) + each(["nor this"], measure)
keys = [Key("ms", over_rows(median, rows, "ms")), Key("none", over_rows(median, [], "ms"))]
sys.exit(finish(Results("t", ["", ""], [], [], keys, {}), given))
"""


def test_a_failed_part_spares_other_parts_and_a_figure_without_data_has_a_reason(tmp_path):
    file = tmp_path / "found.json"
    command = [sys.executable, "-c", PARTS, str(Path(PEERS).parent), "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 130
    begun = [line for line in done.stderr.splitlines() if line.startswith("now ")]
    assert begun == ["now right", "now failing", "now right again", "now interrupted"]
    found = json.loads(file.read_text())
    assert found["keys"] == {"ms": 1.0, "none": None}
    why = "interrupted; failing failed: division by zero"
    assert found["details"]["none"]["note"] == why
    assert [one["part"] for one in found["measured"]] == ["right", "right again"]
    assert f"none not measured ({why})" in done.stdout


def test_a_quick_bench_is_marked(tmp_path):
    (tmp_path / "pair.py").write_text(PAIR.replace("600", "0"))
    running, file = limited(tmp_path, "--quick")
    said, _ = running.communicate(timeout=120)
    assert running.returncode == 0
    assert "1/1 slow" in said
    assert "--quick: one round" in said
    assert json.loads(file.read_text())["quick"] is True
