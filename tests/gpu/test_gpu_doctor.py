"""Scripts that train on one GPU: what the doctor says of them, proves, and cures.

Each is shown to it as a user would, in its own process. Of the CPU, with
FLATOUT_GPU_TESTS_ON=cpu, only what holds there too is asked.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flatout.devices import inventory
from flatout.doctor import Verdict
from flatout.doctor.finding import Finding
from flatout.doctor.first_look import first_look
from flatout.doctor.judge import judge
from flatout.doctor.prove import prove
from flatout.doctor.proving import obstacles
from flatout.observe import Loader, Observation, Optimizer
from flatout.recipe import Parity

RUN = [sys.executable, "-c", "from flatout.cli.main import main; main()", "run"]

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(60)]

START = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

DEVICE = "{device}"
torch.manual_seed(0)
torch.set_num_threads(2)


def convnet(width=32):
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10),
    )

"""

PITFALLS = (
    START
    + """
class Images(Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        image = torch.rand(3, 64, 64, generator=g)
        for _ in range(4):
            image = (image * 255).to(torch.uint8).float() / 255
        return image, i % 10


def main():
    model = convnet().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(Images(), batch_size=64)
    history = []
    for x, y in loader:  # workers_zero
        x, y = x.to(DEVICE), y.to(DEVICE)
        weights = torch.ones(10).to(DEVICE)  # made_on_host
        out = model(x)
        loss = F.cross_entropy(out, y, weight=weights)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        probabilities = out.detach().softmax(1).cpu()
        confident = probabilities.to(DEVICE)  # host_round_trip
        history.append(loss.item() + float(confident[0, 0]))  # item_each_step
        torch.cuda.empty_cache()  # empty_cache


main()
"""
)

CLEAN = (
    START
    + """
def main():
    torch.backends.cudnn.benchmark = True
    x = torch.rand(4096, 3, 32, 32)
    data = TensorDataset(x, torch.randint(0, 10, (4096,)))
    loader = DataLoader(
        data, batch_size=128, shuffle=True, pin_memory=True, num_workers=2,
        persistent_workers=True, drop_last=True,
    )
    model = convnet(64).to(DEVICE, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    for epoch in range(10_000):
        for x, y in loader:
            x = x.to(DEVICE, non_blocking=True, memory_format=torch.channels_last)
            y = y.to(DEVICE, non_blocking=True)
            with torch.autocast(DEVICE, torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
"""
)

# Large products from data that lies on the GPU; the loss is read now and then.
GPU_BOUND = (
    START
    + """
model = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(4)]).to(DEVICE)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
x = torch.rand(8192, 4096, device=DEVICE)
for step in range(1_000_000):
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        loss.item()
"""
)

# Many small operators: the host takes longer to call them than the GPU to compute them.
HOST_BOUND = (
    START
    + """
model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(60)]).to(DEVICE)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)
x = torch.rand(32, 64, device=DEVICE)
for step in range(10_000_000):
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
)

INPUT_BOUND = (
    START
    + """
class Slow(Dataset):
    def __len__(self):
        return 200_000

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        x = torch.rand(3, 32, 32, generator=g)
        for _ in range(6):
            x = x.sort(-1).values.flip(-1) * 0.999
        return x, i % 10


def main():
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(1000):
        for x, y in DataLoader(Slow(), batch_size=64):
            loss = F.cross_entropy(model(x.to(DEVICE)), y.to(DEVICE))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
"""
)

LEFT_ON_CPU = (
    START
    + """
model = convnet()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x, y = torch.rand(32, 3, 32, 32), torch.randint(0, 10, (32,))
for step in range(1_000_000):
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
)

# A few steps to the end, so that weights can be compared.
WHOLE = (
    START
    + """
import sys
model = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.2), nn.ReLU(), nn.Linear(64, 1)).to(DEVICE)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
torch.manual_seed(1)
x, y = torch.rand(512, 32), torch.rand(512, 1)
loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
for epoch in range(4):
    for a, b in loader:
        a, b = a.to(DEVICE), b.to(DEVICE)
        noise = torch.randn_like(a) * 0.01
        loss = F.mse_loss(model(a + noise), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()
torch.save(model.state_dict(), sys.argv[1])
"""
)


@pytest.fixture(autouse=True)
def _in_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def is_gpu(device):
    return device.type == "cuda"


@pytest.fixture
def written(tmp_path, device):
    def write(code: str) -> Path:
        script = tmp_path / "train.py"
        script.write_text(code.replace("{device}", device.type).lstrip())
        return script

    return write


def looked(script: Path, seconds: float = 2.5) -> tuple[Verdict, Observation]:
    look = first_look([script.name], seconds=seconds)
    assert not look.failed, "\n".join(look.output)
    (seen,) = look.observations
    failures = [note for note in seen.notes if "failed" in note]
    assert not failures, failures
    return judge(look.observations, inventory()), seen


def lines_of(verdict: Verdict, name: str) -> list[int]:
    found = [one for one in verdict.findings if one.name == name and one.kind != "note"]
    return [int(one.where.rpartition(":")[2]) for one in found]


def marked(script: Path, name: str) -> int:
    lines = script.read_text().splitlines()
    return 1 + next(at for at, line in enumerate(lines) if line.endswith(f"# {name}"))


def told(verdict: Verdict) -> str:
    """All that a failed test has to show."""
    seen = verdict.observations[0]
    findings = [f"{one.kind} {one.name} {one.where}: {one.what}" for one in verdict.findings]
    facts = [f"steps {seen.steps}, lanes {seen.lanes_ms}", f"{seen.notes}"]
    return "\n".join([*findings, *facts, f"{verdict.critical}"])


def test_each_planted_pitfall_is_named_at_its_line(written, is_gpu):
    script = written(PITFALLS)
    verdict, seen = looked(script)
    items = [c for c in seen.calls if c.kind == "item"]
    assert marked(script, "item_each_step") in [c.site.line for c in items], told(verdict)
    if not is_gpu:
        return
    assert seen.device == "cuda:0"
    assert lines_of(verdict, "workers_zero") == [marked(script, "workers_zero")], told(verdict)
    for name in ("empty_cache", "host_round_trip", "made_on_host"):
        found = [one for one in verdict.findings if one.name == name]
        assert [int(one.where.rpartition(":")[2]) for one in found] == [marked(script, name)], told(
            verdict
        )


def test_a_clean_script_stays_clean(written):
    script = written(CLEAN)
    verdict, seen = looked(script)
    assert verdict.dangers == [], told(verdict)
    planted = {
        *("item_each_step", "memory_not_pinned", "empty_cache", "workers_zero", "gpu_unused"),
        *("host_round_trip", "fp32_slow", "channels_first", "optimizer_unfused", "cudnn_benchmark"),
        *("contexts_unused", "called_twice", "retained_graph", "copy_blocks", "made_on_host"),
    }
    slow = {one.name for one in verdict.findings if one.kind == "slow"}
    assert not slow & planted, told(verdict)
    assert seen.added_us_per_step is not None


def test_a_script_that_the_gpu_limits_is_told_so(written, is_gpu):
    code = GPU_BOUND if is_gpu else GPU_BOUND.replace("4096", "64").replace("8192", "64")
    verdict, _ = looked(written(code))
    if is_gpu:
        assert "the GPU computes for" in verdict.critical.words, told(verdict)
    assert not lines_of(verdict, "memory_not_pinned"), told(verdict)


def test_a_script_that_the_host_limits_is_told_so(written, is_gpu):
    verdict, _ = looked(written(HOST_BOUND))
    if is_gpu:
        assert "the GPU waits for" in verdict.critical.words, told(verdict)
        # What only computes faster gives nothing back where computing is not waited for.
        assert not lines_of(verdict, "fp32_slow"), told(verdict)


def test_a_model_left_on_the_cpu_is_named(written, is_gpu):
    verdict, _ = looked(written(LEFT_ON_CPU))
    assert bool(lines_of(verdict, "gpu_unused")) == is_gpu, told(verdict)


def test_observing_changes_no_weight(written, tmp_path, device):
    import torch

    script = written(WHOLE)
    plain, seen = tmp_path / "plain.pt", tmp_path / "seen.pt"
    start = ["-m", "flatout.observe.start", str(tmp_path / "seen")]
    processes = [
        subprocess.Popen([sys.executable, *command], stderr=subprocess.PIPE, text=True)
        for command in ([script, plain], [*start, script, seen])
    ]
    for process in processes:
        assert process.wait(50) == 0, process.stderr.read()
    a, b = (torch.load(path, weights_only=True) for path in (plain, seen))
    assert all(torch.equal(a[name], b[name]) for name in a)
    observed = Observation.of(json.loads((tmp_path / "seen" / "rank-0.json").read_text()))
    assert (observed.steps, observed.device.partition(":")[0]) == (64, device.type)
    assert not [note for note in observed.notes if "failed" in note], observed.notes


def test_a_script_that_input_limits_is_told_so(written, is_gpu):
    verdict, _ = looked(written(INPUT_BOUND), 1.5)
    if is_gpu:
        assert "the GPU waits for input" in verdict.critical.words, told(verdict)
    assert lines_of(verdict, "workers_zero"), told(verdict)


def test_workers_are_proven_for_a_script_that_input_limits(written, device, monkeypatch):
    # Other tests use the same GPU on purpose.
    monkeypatch.setattr(obstacles, "gpu_use", list)
    script = written(INPUT_BOUND)
    seen = Observation(
        [script.name],
        device=f"{device.type}:0" if device.type == "cuda" else "cpu",
        steps=50,
        ended="stopped",
        usable_cpus=8,
        loaders=[Loader("torch.DataLoader", num_workers=0, batches=50)],
        optimizers=[Optimizer("SGD")],
    )
    cure = {"input.workers": 4}
    workers = Finding("slow", "", "", name="workers_zero", recipe=cure, parity="redrawn")
    lines: list[str] = []
    given = prove(
        Verdict([seen], {}, None, [workers], [], []),
        [script.name],
        budget_s=100,
        allow=Parity.REDRAWN,
        told=lines.append,
    )
    (proof,) = given.proofs
    words = "\n".join([*lines, f"{proof}", given.stopped, f"{given.seconds:.0f} s"])
    assert proof.trial is not None, words
    assert proof.same_batches is True, words
    if device.type == "cuda":
        assert proof.outcome == "prescribed", words


def test_numbers_of_the_gpu_are_deferred_by_flatout_run(written, is_gpu, tmp_path):
    script = written(
        WHOLE.replace("        loss.item()\n", "        losses.append(loss.item())\n")
        .replace("for epoch", "losses = []\nfor epoch")
        .replace("torch.save(model", "print(sum(losses))\ntorch.save(model")
    )

    def run(*command: str, name: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*command, script.name, name],
            capture_output=True,
            text=True,
            timeout=50,
        )
        assert done.returncode == 0, done.stderr
        return done

    plain = run(sys.executable, name="plain.pt")
    cured = run(*RUN, "--set=script.host_syncs=deferred", name="cured.pt")
    assert plain.stdout.strip() in cured.stdout
    assert ("applied: host_syncs" in cured.stdout + cured.stderr) == is_gpu, cured
