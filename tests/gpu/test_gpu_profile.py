"""What a run on a GPU leaves of itself, and what is made of it."""

import json
import subprocess
import sys
import textwrap
import time
import warnings

import pytest
import torch
from torch import nn

import flatout
from flatout.data import arrays
from flatout.measure import STEP_LANES, Profile, profile_schema, use
from flatout.measure.fingerprint import fingerprint

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(60)]

FLATOUT = [sys.executable, "-c", "from flatout.cli.main import main; main()"]
# Decided in advance, so that no time goes to measuring.
PLAIN = {
    "compute": {
        "precision": "fp32",
        "memory_format": "contiguous",
        "rewrites": "off",
        "fused_optimizer": "off",
        "compile": "off",
        "capture": "off",
        "cuda_graph": "off",
    },
    "memory": {"micro_batch": "whole"},
    "input": {"features": "off"},
}
TRAIN = """
    import sys
    import torch, flatout
    torch.manual_seed(0)
    x, y = torch.randn(1280, 256), torch.arange(1280) % 10
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 2048), torch.nn.ReLU(),
        torch.nn.Linear(2048, 10),
    )
    trainer = flatout.Trainer(model, loss="cross_entropy", lr=0.01, run=sys.argv[1])
    trainer.fit((x, y), batch_size=32, epochs=int(sys.argv[2]), progress=False)
"""


def recipe(device, **changes):
    """Plain settings on a device."""
    return flatout.Recipe(world={"device": device.type}, **(PLAIN | changes))


def network(width=512):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def data(samples=2048):
    torch.manual_seed(1)
    return torch.randn(samples, 64), torch.arange(samples) % 10


def quiet(line):
    pass


def flatout_says(folder, *words):
    """What a command prints; it ends well."""
    done = subprocess.run(
        [*FLATOUT, *map(str, words)], cwd=folder, capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_profile_tells_the_device_its_use_and_its_memory(tmp_path, device, monkeypatch):
    monkeypatch.setattr(use, "_EVERY_NS", 50_000_000)
    trainer = flatout.Trainer(
        network(), loss="cross_entropy", recipe=recipe(device), run=tmp_path / "run", say=quiet
    )
    trainer.fit(data(), batch_size=32, epochs=20, progress=False)
    found = Profile.read(tmp_path / "run")
    written = json.loads((tmp_path / "run" / "profile.json").read_text())
    assert set(written) == set(profile_schema()["required"])
    (rank,) = found.ranks
    assert rank.device == str(device)
    assert found.steps.last == rank.steps == 20 * 64
    assert found.steps.samples == 20 * 2048
    assert len(rank.use["seconds"]) > 3
    low, mid, high = found.steps.samples_per_s
    assert low <= mid <= high
    # As many samples a second as the epochs' own times say.
    first, last = found.epochs[1], found.epochs[-1]
    rate = (last["samples"] - first["samples"]) / (last["at_s"] - first["at_s"])
    assert mid > 0.7 * rate
    steps = sum(rank.lanes_ms[lane] for lane in STEP_LANES) * rank.steps / 1e3
    assert steps <= found.epochs[-1]["at_s"] * 1.05
    if device.type == "cuda":
        assert rank.machine["gpus"]
        assert torch.cuda.get_device_name(device) in rank.machine["gpus"]
        assert any(one > 0 for one in rank.use["gpu"])
        assert min(rank.use["gpu_memory_bytes"]) > 1e7


def test_lanes_are_those_of_the_device(tmp_path, device):
    if device.type == "cpu":
        pytest.skip("a CPU is not behind")
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4)))
    x = torch.randn(16384, 2048)
    settings = recipe(device, save={"every": 1_000_000})  # not after each epoch
    trainer = flatout.Trainer(model, loss="mse", recipe=settings, run=tmp_path / "run", say=quiet)
    history = trainer.fit((x, x), batch_size=2048, epochs=12, progress=False)
    # A product of 2048 x 2048 takes the device far longer than the host needs to queue it: what
    # comes back is twice what went forward, whatever the host's clock says.
    ms = history.lanes()
    assert 1.5 < ms["backward"] / ms["forward"] < 3.0
    took = Profile.read(tmp_path / "run").epochs
    whole = (took[-1]["at_s"] - took[1]["at_s"]) * 1e3 / (8 * 10)
    rows = history.timeline.rows()[16:, 1:].sum(axis=1) / 1e6
    assert rows.mean() == pytest.approx(whole, rel=0.35)


def _waits(device, run, monkeypatch):
    """How often a Loop of 60 steps waited for the device within its steps, by what it called."""
    loop = flatout.Loop(run=run, recipe=recipe(device), allow="exact", say=quiet)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    source = arrays(*data()).batch(32)
    compute = lambda batch: nn.functional.cross_entropy(model(batch.inputs), batch.targets)  # noqa: E731
    loop.prepare(model, optimizer)  # nothing is measured
    if loop.monitor.recording is not None:
        loop.monitor.recording._use._every_ns = 1  # look after each step
        loop.monitor.recording._use.due = 0
        loop.monitor._due = 0
    batches = [batch for batch, _ in zip(loop.batches(source), range(60), strict=False)]
    calls = []
    with monkeypatch.context() as patched, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for owner, name in (
            (torch.cuda, "synchronize"),
            (torch.cuda.Event, "synchronize"),
            (torch.cuda.Stream, "synchronize"),
        ):
            original = getattr(owner, name)

            def counts(*given, _original=original, **named):
                calls.append(_original)
                return _original(*given, **named)

            patched.setattr(owner, name, counts)
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            for batch in batches:
                loop.step(compute, batch)
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    syncs = sum("synchronizing CUDA operation" in str(one.message) for one in told)
    loop.close()
    return len(calls), syncs, loop.timeline.steps


def test_recording_waits_for_the_device_in_no_step(tmp_path, device, monkeypatch):
    plain = _waits(device, None, monkeypatch)
    recorded = _waits(device, tmp_path / "run", monkeypatch)
    assert recorded == plain
    assert recorded[0] == 0
    # The flag of the numbers' guard, once in 50 steps.
    assert recorded[1] <= 2
    assert Profile.read(tmp_path / "run").steps.last == 60


def test_forecast_report_and_runs_of_a_cpu_and_a_gpu(tmp_path, device):
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAIN))
    (tmp_path / "prices.toml").write_text(
        'currency = "USD"\n[prices]\n"c5.4xlarge" = 0.68\n"p5.4xlarge" = 6.88\n'
    )
    for where, folder, epochs in (("cpu", "on_cpu", 2), (device.type, "on_gpu", 6)):
        flatout_says(
            tmp_path, "run", "--set", f"world.device={where}", "train.py", f"runs/{folder}", epochs
        )
    named = ["runs/on_cpu", "runs/on_gpu"]
    if device.type == "cuda":
        words = flatout_says(tmp_path, "forecast", *named, "--price", "prices.toml")
        assert "x [" in words
        assert "USD per million samples" in words
        assert all(len(line) <= 80 for line in words.splitlines()), words
        found = json.loads(
            flatout_says(tmp_path, "forecast", *named, "--price", "prices.toml", "--json")
        )
        decided = {one["about"]: one for one in found["decisions"]}
        assert decided["device"]["choice"] in ("c5.4xlarge", "p5.4xlarge")
        assert decided["device"]["number"] >= 1
        assert decided["money"]["number"] > 0
    page = tmp_path / "both.html"
    words = flatout_says(tmp_path, "report", *named, "--html", page)
    html = page.read_text()
    assert "on_gpu" in words
    assert html.startswith("<!doctype html>")
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        assert "cuda" in words
        assert name in html
        assert "GPU" in html
        one = tmp_path / "one.html"
        flatout_says(tmp_path, "report", "runs/on_gpu", "--html", one)
        assert "GPU" in one.read_text()
        assert name in one.read_text()


def test_top_shows_a_job_and_the_gpus(tmp_path, device):
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAIN))
    running = subprocess.Popen(
        [*FLATOUT, "run", "--set", f"world.device={device.type}", "train.py", "runs/one", "100000"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
    )
    try:
        end = time.monotonic() + 45
        ranks: list = []
        while not ranks and time.monotonic() < end:
            found = json.loads(flatout_says(tmp_path, "top", "runs/one", "--json"))
            ranks = [r for job in found["jobs"] for r in job["ranks"] if r["steps"] > 100]
    finally:
        running.kill()
        running.wait()
    (rank,) = ranks
    assert rank["throughput"] > 0
    assert rank["lanes_ms"]["forward"] > 0
    assert len(found["gpus"]) == len(fingerprint().gpus)
    if device.type == "cuda":
        gpu = found["gpus"][0]
        assert gpu["name"] in fingerprint().gpus
        assert gpu["memory_used"] > 0


def test_a_job_asks_the_cluster_for_the_gpus_that_it_uses(tmp_path, device):
    (tmp_path / "train.py").write_text("print('here')\n")
    words = ["submit", "slurm", "--dry-run", "--time", "1h", "--shared", "/"]
    asked = flatout_says(tmp_path, *words, "--gpus", "1", "train.py")
    assert "#SBATCH --gpus-per-node=1\n" in asked
    plain = flatout_says(tmp_path, *words, "train.py")
    assert ("#SBATCH --gpus-per-node=1\n" in plain) == (device.type == "cuda")
    on_cpu = flatout_says(tmp_path, *words, "--gpus", "0", "train.py")
    assert "gpus-per-node" not in on_cpu
