import json
import os
import signal
import socket
import subprocess
import sys
from time import perf_counter_ns

import psutil
import pytest

from flatout.cache_folder import cache_folder, kind_folder
from flatout.measure.live import Live, Ranks, point_to, remove_own_file
from flatout.measure.timeline import LANES, Timeline

MS = 1_000_000


def _own():
    return cache_folder() / "live" / f"{os.getpid()}.json"


def _record(timeline, *, steps, input, forward, samples=0):
    start = perf_counter_ns()
    for step in range(steps):
        at = start + step * (input + forward) * MS
        timeline.record(at, input * MS, 0, forward * MS, 0, 0, 0, 0, samples)


def test_what_a_rank_writes_is_read_and_goes_with_it():
    timeline = Timeline()
    live = Live(timeline, rank=1, world_size=2, job="j", run="runs/a")
    assert Ranks().read() == []
    _record(timeline, steps=10, input=30, forward=10, samples=64)
    live.write()
    (rank,) = Ranks().read()
    assert (rank.pid, rank.rank, rank.world_size, rank.job) == (os.getpid(), 1, 2, "j")
    assert rank.run == os.path.abspath("runs/a")
    assert rank.command == sys.argv
    assert rank.steps == 10
    assert set(rank.lanes_ms) == set(LANES)
    assert rank.lanes_ms["input"] == pytest.approx(30)
    assert rank.lanes_ms["forward"] == pytest.approx(10)
    assert rank.throughput == pytest.approx(64 / 0.04)
    _record(timeline, steps=10, input=30, forward=10, samples=16)
    live.write()
    assert Ranks().read()[0].throughput == pytest.approx(40 / 0.04)  # as many as there were
    live.close()
    live.close()
    assert Ranks().read() == []
    assert not list((cache_folder() / "live").glob("*.json"))


def test_lanes_are_of_the_latest_steps_and_starvation_is_counted():
    timeline = Timeline()
    live = Live(timeline)
    _record(timeline, steps=100, input=1, forward=9)
    live.write()
    (rank,) = Ranks().read()
    assert (rank.starved_s, rank.is_starved) == (0, False)
    assert rank.watched_s == pytest.approx(1)
    # Earlier than the latest seconds, but watched.
    live._looks[-1] = type(live._looks[-1])(
        live._looks[-1].at - 10, live._looks[-1].steps, live._looks[-1].totals
    )
    live._looks[0] = type(live._looks[0])(live._looks[0].at - 10, 0, live._looks[0].totals)
    _record(timeline, steps=50, input=90, forward=10)
    live.write()
    (rank,) = Ranks().read()
    assert rank.lanes_ms["input"] == pytest.approx(90)
    assert rank.starved_s == pytest.approx(5, rel=0.01)
    assert rank.is_starved
    live.close()


def test_a_timeline_that_starts_over_is_read_again():
    timeline = Timeline()
    live = Live(timeline)
    _record(timeline, steps=100, input=50, forward=50)
    live.write()
    timeline.reset()
    _record(timeline, steps=10, input=1, forward=3)
    live.write()
    (rank,) = Ranks().read()
    assert rank.steps == 10
    assert rank.lanes_ms["input"] == pytest.approx(1)
    live.close()


def test_it_can_be_turned_off(monkeypatch):
    monkeypatch.setenv("FLATOUT_LIVE", "0")
    assert Live(Timeline()).due > perf_counter_ns() + 10**18
    point_to("rank-0.json")
    assert not _own().exists()


def test_what_cannot_be_written_stops_no_job():
    cache_folder().mkdir(parents=True)
    (cache_folder() / "live").write_text("in the way of the folder")
    live = Live(Timeline())
    live.write()
    assert Ranks().read() == []
    live.close()
    point_to("rank-0.json")
    remove_own_file()


def test_a_file_of_a_process_before_with_the_same_pid_is_no_job():
    live = Live(Timeline())
    live.write()
    data = json.loads(_own().read_text())
    _own().write_text(json.dumps(data | {"started": data["started"] - 3600}))
    assert Ranks().read() == []
    _own().write_text(json.dumps(data | {"host": "another"}))
    assert Ranks().read() == []
    _own().write_text("{half a")
    assert Ranks().read() == []
    live.close()


@pytest.mark.parametrize("shows", [True, False])
def test_a_killed_job_is_gone_and_its_file_is_swept_away(shows):
    script = (
        "import time\n"
        "from flatout.measure.live import Live\n"
        "from flatout.measure.timeline import Timeline\n"
        "Live(Timeline()).write(); print('up', flush=True); time.sleep(60)\n"
    )
    # The Live is dropped, but the process stays: what a forgotten Loop leaves ends with it.
    script = script.replace("Live(Timeline()).write()", "live = Live(Timeline()); live.write()")
    job = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert job.stdout.readline() == "up\n"
        assert [rank.pid for rank in Ranks().read()] == [job.pid]
        job.send_signal(signal.SIGKILL)
        # It is gone also while no one has asked for its end.
        os.waitid(os.P_PID, job.pid, os.WEXITED | os.WNOWAIT)
        assert Ranks().read() == []
    finally:
        job.kill()
        job.wait()
        job.stdout.close()
    left = cache_folder() / "live" / f"{job.pid}.json"
    assert left.exists()
    live = Live(Timeline())
    if shows:
        live.write()
        assert not left.exists()
    live.close()  # of a job that ends before it has shown anything, too
    assert not left.exists()


def test_an_observation_is_shown_through_a_pointer(tmp_path):
    file = tmp_path / "rank-1.json"
    point_to(file, rank=1, world_size=2, job="j")
    (rank,) = (ranks := Ranks()).read()
    assert (rank.rank, rank.steps, rank.lanes_ms) == (1, 0, {})

    def observe(steps, input, forward):
        lanes = {"input": input, "forward": forward, "sync": None}
        seen = {"command": ["t.py"], "steps": steps, "lanes_ms": lanes, "rank": 1}
        file.write_text(json.dumps(seen))

    observe(steps=100, input=2.0, forward=8.0)
    (rank,) = ranks.read()
    assert rank.command == ["t.py"]
    assert rank.lanes_ms == {"input": 2.0, "forward": 8.0, "sync": None}
    # 100 steps more, with 18 ms of input each: of all steps the mean is 10.
    observe(steps=200, input=10.0, forward=8.0)
    (rank,) = ranks.read()
    assert rank.steps == 200
    assert rank.lanes_ms["input"] == pytest.approx(18)
    remove_own_file()
    assert ranks.read() == []


def _forged(**changes):
    """A file that another job might have written, with something wrong."""
    good = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "command": ["train.py"],
        "started": psutil.Process().create_time(),
        "updated": 1.0,
        "rank": 0,
        "world_size": 1,
        "job": "j",
        "run": None,
        "steps": 3,
        "lanes_ms": {"input": 1.0},
        "throughput": None,
    }
    return json.dumps({name: v for name, v in {**good, **changes}.items() if v is not ...})


FORGED = [
    "",
    "null",
    "[" * 100_000,
    "[1, 2]",
    '"' + "x" * 20_000_000 + '"',
    "\0\1",
    *(
        _forged(**changes)
        for changes in (
            {"pid": "1"},
            {"pid": True},
            {"pid": 2**80},
            {"pid": -1},
            {"host": []},
            {"command": "train.py"},
            {"command": [1]},
            {"command": None},
            {"started": "now"},
            {"started": float("nan")},
            {"updated": []},
            {"updated": float("inf")},
            {"rank": 1},
            {"rank": -1},
            {"world_size": 10**9},
            {"world_size": 1.5},
            {"job": 1},
            {"job": ...},
            {"run": 7},
            {"steps": "many"},
            {"steps": 10**40},
            {"lanes_ms": [1]},
            {"lanes_ms": {"input": "x"}},
            {"lanes_ms": {"input": float("inf")}},
            {"throughput": {}},
            {"watched_s": "x"},
        )
    ),
]


@pytest.mark.parametrize("content", FORGED, ids=range(len(FORGED)))
def test_a_file_that_no_job_has_written_is_passed_over(content):
    kind_folder("live")
    _own().write_text(_forged())
    assert [rank.command for rank in Ranks().read()] == [["train.py"]]
    _own().write_text(content)
    assert Ranks().read() == []


def test_what_is_no_file_of_this_user_is_passed_over(tmp_path):
    folder = _own().parent
    folder.mkdir(parents=True, exist_ok=True)
    os.mkfifo(_own())  # reading it would wait forever
    assert Ranks().read() == []
    _own().unlink()
    (tmp_path / "elsewhere").write_text(_forged())
    _own().symlink_to(tmp_path / "elsewhere")
    assert Ranks().read() == []
    _own().unlink()
    (folder / "1234.json").write_text(_forged())  # under another process' name
    assert Ranks().read() == []
    if os.geteuid() == 0:
        _own().write_text(_forged())
        os.chown(_own(), 65534, 65534)
        assert Ranks().read() == []


def test_a_process_without_python_is_no_rank():
    other = subprocess.Popen(["sleep", "60"])
    try:
        started = psutil.Process(other.pid).create_time()
        file = _own().with_name(f"{other.pid}.json")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(_forged(pid=other.pid, started=started))
        assert Ranks().read() == []
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize(
    "observed",
    ["", "[]", '{"steps": "x", "lanes_ms": {}}', '{"steps": 1, "lanes_ms": 5, "command": []}',
     '{"steps": 1, "lanes_ms": {"input": []}, "command": []}', "{}"],
)  # fmt: skip
def test_an_observation_that_none_has_written_fails_nothing(tmp_path, observed):
    (tmp_path / "rank-0.json").write_text(observed)
    point_to(tmp_path / "rank-0.json")
    assert all(rank.steps == 0 for rank in Ranks().read())
    remove_own_file()
