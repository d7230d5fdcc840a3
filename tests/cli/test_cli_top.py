"""`flatout top` on real jobs."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from flatout.measure import usable_cpus
from flatout.measure.timeline import LANES

TOP = [sys.executable, "-c", "from flatout.cli.main import main; main()", "top"]
# Decided in advance, so that no time goes to measuring.
RECIPE = """
[compute]
precision = "fp32"
memory_format = "contiguous"
rewrites = "off"
fused_optimizer = "off"
compile = "off"
[memory]
allocator = "default"
micro_batch = "whole"
[process]
threads = 1
affinity = "off"
flush_denormals = "off"
"""
TRAIN = """
    import sys, time
    import torch, flatout

    class Slow(torch.utils.data.Dataset):
        def __len__(self):
            return 4000
        def __getitem__(self, index):
            time.sleep(0.01)
            return torch.ones(4), index % 2

    loader = torch.utils.data.DataLoader(Slow(), batch_size=10)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    trainer = flatout.Trainer(model, loss="cross_entropy", lr=0.01, run=sys.argv[1])
    trainer.fit(loader, epochs=1, progress=False)
"""


@pytest.fixture
def begin(tmp_path):
    """Begins the job, on one or more ranks, and waits until all of them show themselves."""
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAIN))
    (tmp_path / "recipe.toml").write_text(RECIPE)
    begun = []

    def begin(devices):
        command = [*TOP[:-1], "run", "--devices", str(devices), "--recipe", "recipe.toml"]
        env = {**os.environ, "FLATOUT_CACHE": str(tmp_path / "cache")}
        output = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        job = subprocess.Popen(
            [*command, "train.py", "runs/one"], cwd=tmp_path, env=env, text=True, **output
        )
        begun.append(job)
        until = time.monotonic() + 120
        live = tmp_path / "cache" / "live"
        while len(list(live.glob("*.json"))) < devices:
            assert job.poll() is None, job.stderr.read()
            assert time.monotonic() < until
            time.sleep(0.1)
        return job

    yield begin
    for job in begun:
        job.send_signal(signal.SIGTERM)
        try:
            job.communicate(timeout=60)
        finally:
            job.kill()
    if begun:
        assert not list((tmp_path / "cache" / "live").glob("[!.]*"))


def _top(folder, *arguments):
    env = {**os.environ, "FLATOUT_CACHE": str(folder / "cache"), "COLUMNS": "80"}
    return subprocess.run(
        [*TOP, *arguments], capture_output=True, text=True, env=env, cwd=folder, timeout=120
    )


def _check_schema(found, world_size):
    assert set(found) == {"host", "time", "jobs", "processes", "gpus"}
    (job,) = found["jobs"]
    assert set(job) == {"job", "run", "command", "world_size", "ranks"}
    assert job["command"] == ["train.py", "runs/one"]
    assert job["world_size"] == world_size
    assert [rank["rank"] for rank in job["ranks"]] == list(range(world_size))
    for rank in job["ranks"]:
        assert set(rank["lanes_ms"]) == set(LANES)
        assert all(ms >= 0 for ms in rank["lanes_ms"].values())
        assert rank["steps"] > 0
        assert rank["throughput"] > 0
        assert rank["rss_bytes"] > 1e7
        assert rank["cpu_percent"] >= 0
    return job


@pytest.mark.slow
def test_a_running_job_is_shown_until_it_ends(begin, tmp_path):
    begin(1)
    job = _check_schema(json.loads(_top(tmp_path, "--json").stdout), 1)
    (rank,) = job["ranks"]
    assert rank["lanes_ms"]["input"] >= 100  # ten samples of ten milliseconds
    assert rank["is_starved"]
    assert job["run"] == str(tmp_path / "runs" / "one")

    shown = _top(tmp_path, "runs/one", "--once").stdout  # no terminal
    assert shown.startswith("train.py runs/one · pid ")
    assert re.search(r"^STARVED: it waited for input \d+ of \d+ s$", shown, re.M)
    assert all(len(line.rstrip()) <= 80 for line in shown.splitlines())
    other = _top(tmp_path, "runs/two")
    assert other.returncode == 1
    assert "no job runs/two that shows its lanes" in other.stderr

    outside = json.loads(_top(tmp_path, "--pid", str(rank["pid"]), "--json").stdout)
    assert outside["processes"][0]["pid"] == rank["pid"]
    _check_schema(outside, 1)
    _end_a_screen_with_ctrl_c(tmp_path)


def _end_a_screen_with_ctrl_c(folder):
    """On a terminal it shows the job again and again; Ctrl-C ends it without an error."""
    env = {**os.environ, "FLATOUT_CACHE": str(folder / "cache"), "TERM": "xterm"}
    own, its = pty.openpty()
    screen = subprocess.Popen(TOP, stdin=its, stdout=its, stderr=its, env=env)
    os.close(its)
    seen = b""
    until = time.monotonic() + 60
    while seen.count(b"STARVED: ") < 2 and time.monotonic() < until:
        if select.select([own], [], [], 0.2)[0]:
            seen += os.read(own, 65536)
    screen.send_signal(signal.SIGINT)
    while select.select([own], [], [], 1.0)[0]:
        try:
            seen += os.read(own, 65536)
        except OSError:  # no one writes any more
            break
    os.close(own)
    assert screen.wait(timeout=120) == 0
    assert seen.count(b"STARVED: ") >= 2
    assert b"Traceback" not in seen


OBSERVED = """
    import time, torch
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    class Slow(torch.utils.data.Dataset):
        def __len__(self):
            return 100_000
        def __getitem__(self, index):
            time.sleep(0.005)
            return torch.ones(4), index % 2

    for inputs, targets in torch.utils.data.DataLoader(Slow(), batch_size=10):
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.slow
def test_an_observed_script_is_shown_while_it_runs(tmp_path):
    (tmp_path / "plain.py").write_text(textwrap.dedent(OBSERVED))
    observe = [sys.executable, "-m", "flatout.observe.start", str(tmp_path / "seen"), "plain.py"]
    env = {**os.environ, "FLATOUT_CACHE": str(tmp_path / "cache")}
    job = subprocess.Popen(observe, cwd=tmp_path, env=env, stderr=subprocess.PIPE)
    try:
        until = time.monotonic() + 60
        steps = 0
        while steps < 20 and time.monotonic() < until:
            assert job.poll() is None, job.stderr.read()
            found = json.loads(_top(tmp_path, "--json").stdout)["jobs"]
            steps = found[0]["ranks"][0]["steps"] if found else 0
        (rank,) = found[0]["ranks"]
        assert (rank["pid"], rank["command"]) == (job.pid, ["plain.py"])
        assert rank["lanes_ms"]["input"] >= 50
        assert rank["is_starved"]
        assert re.search(r"STARVED: it waited for input", _top(tmp_path, "plain.py").stdout)
        job.send_signal(signal.SIGINT)
        job.communicate(timeout=60)
        assert not list((tmp_path / "cache" / "live").glob("[!.]*"))
    finally:
        job.kill()
        job.communicate()


@pytest.mark.slow
def test_any_process_is_shown_from_outside(tmp_path):
    found = _top(tmp_path, "--pid", str(os.getpid()))
    assert found.returncode == 0
    assert str(os.getpid()) in found.stdout
    assert "only CPU, memory, threads" in found.stdout
    none = _top(tmp_path)
    assert none.returncode == 1
    assert "no job that shows its lanes is running here" in none.stderr
    assert json.loads(_top(tmp_path, "--json").stdout)["jobs"] == []


@pytest.mark.slow
@pytest.mark.skipif(usable_cpus() < 2, reason="two ranks take two CPUs")
def test_two_ranks_are_one_job(begin, tmp_path):
    begin(2)
    job = _check_schema(json.loads(_top(tmp_path, "--json").stdout), 2)
    assert len({rank["pid"] for rank in job["ranks"]}) == 2
    shown = _top(tmp_path).stdout
    assert "· 2 ranks ·" in shown
    assert re.search(r"^   1 ", shown, re.M)
