"""Ranks on GPUs: several that share one, what they are refused, and models on two devices."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import flatout
from flatout.errors import DeviceError

sys.path.insert(0, str(Path(__file__).parent))
import gpu_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(60)]

JOB = Path(__file__).parent / "gpu_ranks.py"
CLI = "from flatout.cli.main import main; main()"


def start(folder, device, size, how):
    """Ranks as torchrun would start them, each told its place alone."""
    folder.mkdir(exist_ok=True)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    ranks = []
    for rank in range(size):
        own = {
            "RANK": rank,
            "WORLD_SIZE": size,
            "LOCAL_RANK": rank,
            "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        env = os.environ | {"OMP_NUM_THREADS": "1", "FLATOUT_CACHE": str(folder / "cache")}
        ranks.append(
            subprocess.Popen(
                [sys.executable, str(JOB), str(folder), device, json.dumps(how)],
                env=env | {name: str(value) for name, value in own.items()},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=folder,
            )
        )
    return ranks


def ended(ranks):
    """Exit codes and output of all."""
    try:
        said = [rank.communicate(timeout=50)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [rank.returncode for rank in ranks], said


def run(folder, device, size=2, **how):
    """Weights and what was told, of ranks that all end well."""
    codes, said = ended(start(folder, device, size, how))
    assert codes == [0] * size, "\n".join(said)
    return load_file(folder / "weights"), json.loads((folder / "told.json").read_text())


def launch(folder, *arguments, timeout=50):
    """`flatout run` with these arguments."""
    return subprocess.run(
        [sys.executable, "-c", CLI, "run", *map(str, arguments)],
        env=os.environ | {"FLATOUT_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=timeout,
    )


def assert_close(found, expected, atol=2e-5):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, atol=atol, rtol=1e-4), (
            name,
            (found[name] - value).abs().max(),
        )


STRATEGIES = {
    "ddp": {},
    "parameter_server": {"world": {"servers": 2}},
    "local_sgd": {"world": {"sync_every": 1}, "optimizer": "sgd"},
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_that_share_a_device_get_the_result_of_one(strategy, device, tmp_path):
    how = STRATEGIES[strategy]
    optimizer = how.get("optimizer", "adam")
    expected, one = gpu_ranks.train(str(device), optimizer=optimizer, again=True)
    world = {"strategy": strategy, **how.get("world", {})}
    found, told = run(tmp_path, str(device), world=world, optimizer=optimizer, again=True)
    assert (told["ranks"], told["device"], told["on"]) == (2, str(device), [str(device)])
    if strategy == "local_sgd":
        # Each rank clips the gradient of its own part.
        assert told["loss"] == pytest.approx(one["loss"], rel=0.2)
    else:
        assert_close(found, expected)
        assert told["loss"] == pytest.approx(one["loss"], rel=1e-4)
    if device.type == "cuda":
        assert any("ranks share a GPU" in line for line in told["said"])


@pytest.mark.parametrize("optimizer", ["adam", "fused"])
def test_servers_in_cpu_memory_step_the_weights_of_workers_on_gpus(optimizer, device, tmp_path):
    world = {"strategy": "parameter_server", "servers": 1, "staleness": 2}
    found, told = run(tmp_path, str(device), world=world, optimizer=optimizer, epochs=6, again=True)
    assert told["on"] == [str(device)]
    assert all(torch.isfinite(value).all() for value in found.values())
    _, one = gpu_ranks.train(str(device), epochs=1)
    assert told["loss"] < one["loss"]


@pytest.mark.parametrize(
    ("strategy", "refused"),
    [("staged", "world.strategy=staged cannot place"), ("fsdp", "these ranks share a GPU")],
)
def test_what_ranks_that_share_a_gpu_cannot_do_is_refused(strategy, refused, device, tmp_path):
    if device.type == "cpu":
        pytest.skip("so it is on GPUs alone")
    codes, said = ended(start(tmp_path, str(device), 2, {"world": {"strategy": strategy}}))
    assert 0 not in codes
    assert any(refused in words for words in said), said
    assert any("world.strategy=ddp" in words for words in said), said


def test_a_checkpoint_of_ranks_on_a_gpu_goes_on_on_cpus_and_back(device, tmp_path):
    whole, _ = gpu_ranks.train(str(device), epochs=3)
    kept = str(tmp_path / "run")
    world = {"strategy": "parameter_server", "servers": 2}
    run(tmp_path / "first", str(device), world=world, epochs=1, run=kept)
    _, told = run(tmp_path / "second", "cpu", epochs=2, run=kept)
    assert (told["device"], told["ranks"]) == ("cpu", 2)
    assert any("resumed step 4" in line for line in told["said"])
    weights, told = gpu_ranks.train(str(device), epochs=3, run=kept)
    assert (told["device"], told["ranks"]) == (str(device), 1)
    assert any("resumed step 8" in line for line in told["said"])
    assert_close(weights, whole, atol=1e-4)


def test_a_rank_on_a_gpu_that_is_killed_comes_back(device, tmp_path):
    whole, _ = gpu_ranks.train(str(device), epochs=3)
    how = {"epochs": 3, "run": str(tmp_path / "run"), "kills": 7}
    settings = ["--set", f"world.device={device}"]
    done = launch(tmp_path, "--devices", 2, *settings, JOB, tmp_path, str(device), json.dumps(how))
    assert done.returncode == 0, done.stderr
    assert "was killed by SIGKILL" in done.stderr
    assert_close(load_file(tmp_path / "weights"), whole)


def test_more_ranks_than_gpus_are_refused_and_cpus_are_offered(device, tmp_path):
    if device.type == "cpu" or torch.cuda.device_count() > 1:
        pytest.skip("for a machine with one GPU")
    how = json.dumps({"epochs": 1})
    done = launch(tmp_path, "--devices", 2, JOB, tmp_path, "auto", how)
    assert done.returncode != 0
    assert "2 ranks were asked for, but this node has 1 GPU" in done.stderr
    assert "--set world.device=cpu" in done.stderr
    done = launch(tmp_path, "--devices", 2, "--set", "world.device=cpu", JOB, tmp_path, "auto", how)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "told.json").read_text())["device"] == "cpu"
    # torchrun asks no one how many GPUs there are.
    codes, said = ended(start(tmp_path, "auto", 2, {"epochs": 1}))
    assert 0 not in codes
    assert all("2 ranks on this node, but 1 GPU" in words for words in said), said


NCCL = """
import torch
import torch.distributed as dist
import flatout
from flatout.strategies.reductions import Flat
from flatout.strategies.reductions.collectives import AllReduce
from flatout.strategies.reductions.halves import Halves
from flatout.strategies.reductions.collectives import Hierarchical
from flatout.strategies.reductions.power_sgd import PowerSgd
from flatout.strategies.reductions.collectives import Ring
from flatout.strategies.reductions.collectives import ToOne
from flatout.world import Group

device = torch.device({device!r})
on_gpu = device.type == "cuda"
if on_gpu:
    torch.cuda.set_device(device)
dist.init_process_group(
    "nccl" if on_gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1
)
group = Group((0,), 0, dist.new_group([0]))
values = torch.randn(64 * 48 + 7, device=device)
kinds = [
    (AllReduce(group), 0), (Ring(group), 0), (ToOne(group), 0), (PowerSgd(group, 1), None),
    (Halves(group, torch.bfloat16), 2e-2), (Halves(group, torch.float16), 2e-3),
    (Hierarchical(group, AllReduce(group), carries=False), 0),
]
for reduction, rounding in kinds:
    beside = reduction.started(device)
    flat = beside.memory(0, len(values), torch.float32)
    if on_gpu:
        torch.cuda._sleep(200_000_000)  # what is to be added up is still being computed
    flat.copy_(values * 2)
    begun = beside.begin(Flat(flat, 0, [(64, 48), (7, 1)]))
    begun.wait()
    found = flat.clone()
    flat.zero_()
    assert found.isfinite().all(), reduction
    if rounding is not None:
        assert torch.allclose(found, values * 2, rtol=rounding, atol=rounding), reduction
    beside.close()

# A script's own channel for GPUs alone.
model = torch.nn.Linear(8, 1)
trainer = flatout.Trainer(
    model, loss="mse", lr=0.01, recipe=flatout.Recipe(world={{"device": {device!r}}})
)
x = torch.randn(64, 8)
history = trainer.fit((x, x[:, :1]), epochs=1, batch_size=16, progress=False)
assert history.epochs[-1]["loss"] > 0
dist.destroy_process_group()
print("done")
"""


def test_reductions_through_nccl_wait_for_what_is_still_computed(device, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", NCCL.format(device=str(device))],
        env=os.environ | {"FLATOUT_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=50,
    )
    assert done.stdout.strip().endswith("done"), done.stderr


def test_each_rank_draws_its_own_numbers_and_all_go_on_alike(device):
    from flatout.strategies.rank_rng import rank_rng
    from flatout.world import Place, World

    drawn, after = [], []
    for rank in range(2):
        torch.manual_seed(3)
        torch.rand(2, device=device)
        with rank_rng(World(Place(rank, 2, rank, 2))):
            drawn.append(torch.rand(5, device=device).tolist())
        after.append([torch.rand(5, device=device).tolist(), torch.rand(5).tolist()])
    assert drawn[0] != drawn[1]
    assert after[0] == after[1]


def test_random_states_of_more_gpus_than_are_here_are_taken_as_far_as_they_go(device):
    from flatout.train.snapshot import random_state, set_random_state

    torch.rand(1, device=device)
    state = random_state()
    first = torch.rand(4, device=device)
    if "cuda" in state:
        state["cuda"] = [*state["cuda"], *state["cuda"]]
    set_random_state(state)
    assert torch.equal(torch.rand(4, device=device), first)


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        # A bias before BatchNorm has rounding alone as its gradient, of which Adam makes steps.
        self.encoder = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh())
        self.decoder = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        return self.decoder(self.encoder(x))


def halves(encoder, decoder, run=None, placement="soft", **given):
    torch.manual_seed(0)
    model, said = Halves(), []
    if encoder is not None:
        flatout.pin(model.encoder, encoder)
        flatout.pin(model.decoder, decoder)
    trainer = flatout.Trainer(
        model,
        loss="mse",
        optimizer=torch.optim.Adam(model.parameters(), 0.01),
        allow="tolerant",
        recipe=flatout.Recipe(
            world={"device": "auto" if encoder else "cpu", "placement": placement},
            compute={"precision": "fp32"},
        ),
        run=run,
        say=said.append,
        **given,
    )
    return model, trainer, said


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_model_on_two_devices_trains_as_on_one_and_goes_on(accumulate, device, tmp_path):
    def fit(trainer, epochs, **given):
        return trainer.fit(
            gpu_ranks.data(), batch_size=30, epochs=epochs, shuffle=False, progress=False, **given
        )

    plain, trainer, _ = halves(None, None, accumulate=accumulate)
    expected = fit(trainer, 4)
    model, trainer, _ = halves(str(device), "cpu", accumulate=accumulate)
    history = fit(trainer, 4)
    assert history.epochs[-1]["loss"] == pytest.approx(expected.epochs[-1]["loss"], rel=1e-3)
    assert {p.device.type for p in model.encoder.parameters()} == {device.type}
    assert {p.device.type for p in model.decoder.parameters()} == {"cpu"}
    lines = trainer.loop.placement.describe().splitlines()
    if device.type == "cuda":
        assert lines == [
            "encoder.0 ... encoder.1 (2): cuda:0, pinned",
            "decoder.0 ... decoder.2 (2): cpu, pinned",
        ]
    x, _ = gpu_ranks.data()
    assert torch.allclose(
        trainer.predict(x[:5]).cpu(), plain.eval()(x[:5]).detach(), atol=1e-3, rtol=1e-3
    )
    folder = str(tmp_path / "run")
    fit(halves(str(device), "cpu", folder, accumulate=accumulate)[1], 2)
    resumed, trainer, _ = halves(str(device), "cpu", folder, accumulate=accumulate)
    fit(trainer, 4, resume=True)
    for found, value in zip(
        resumed.state_dict().values(), model.state_dict().values(), strict=True
    ):
        assert found.device == value.device
        assert torch.equal(found, value)


def test_a_pin_to_a_gpu_that_is_not_here(device):
    missing = "cuda:7"
    model, trainer, said = halves(str(device), missing)
    trainer.fit(gpu_ranks.data(), batch_size=30, epochs=1, progress=False)
    home = str(trainer.loop.device)
    assert {str(p.device) for p in model.decoder.parameters()} == {home}
    assert any(f"runs on {home} instead of {missing}" in line for line in said), said
    with pytest.raises(DeviceError, match=f"pinned to {missing}, which cannot be used here"):
        halves(str(device), missing, placement="strict")[1].fit(
            gpu_ranks.data(), batch_size=30, epochs=1, progress=False
        )


ASLEEP = """
import os, sys
sys.argv = ["flatout", *{arguments!r}]
import flatout
from flatout.cli.main import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
torch = sys.modules.get("torch")
assert torch is None or not torch.cuda.is_initialized()
# CUDA keeps the device of unified memory open; NVML closes it again.
for name in os.listdir("/proc/self/fd"):
    try:
        opened = os.readlink(f"/proc/self/fd/{{name}}")
    except OSError:
        continue
    assert "nvidia-uvm" not in opened, (opened, "torch" in sys.modules)
"""


@pytest.mark.parametrize("arguments", [["--help"], ["devices"], ["devices", "--json"]])
def test_looking_at_gpus_does_not_wake_them(arguments, device, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", ASLEEP.format(arguments=arguments)],
        env=os.environ | {"FLATOUT_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    if device.type == "cpu" or arguments == ["--help"]:
        return
    if "--json" in arguments:
        found = json.loads(done.stdout)["gpus"]
        assert sum(gpu["cuda_index"] is not None for gpu in found) == torch.cuda.device_count()
    else:
        assert torch.cuda.get_device_name(device).removeprefix("NVIDIA ") in done.stdout
