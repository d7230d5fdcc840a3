"""Cures that round otherwise: they take hold where they should, and nowhere else."""

import json

import pytest

TRAINING = """
import json, sys, torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 3))
seen = {}

def look(module, inputs, output):
    seen.setdefault("inner", str(output.dtype))
    seen.setdefault("last", output.is_contiguous(memory_format=torch.channels_last))

model[0].register_forward_hook(look)
optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
x, y = torch.randn(16, 3, 8, 8), torch.randint(0, 3, (16,))
losses = []
for step in range(6):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=sys.argv[1:] == ["cast"]):
        output = model(x)
    seen["output"] = str(output.dtype)
    loss = nn.functional.cross_entropy(output.float(), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
group = optimizer.param_groups[0]
print(json.dumps({"losses": losses, "seen": seen, "fused": group["fused"],
                  "keys": sorted(model.state_dict()), "weight": str(model[0].weight.dtype)}))
"""


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    path = tmp_path_factory.mktemp("training") / "train.py"
    path.write_text(TRAINING)
    return path


def told(done):
    assert done.code == 0, done.err
    return json.loads(done.out)


@pytest.fixture(scope="module")
def plain(scripts, training):
    return told(scripts.run(training))


def is_near(found, plain, distance):
    assert found["losses"] == pytest.approx(plain["losses"], abs=distance)
    assert found["losses"] != plain["losses"]


def test_bf16_is_within_the_model_alone(scripts, training, plain):
    done = scripts.run(training, "compute.precision=bf16")
    found = told(done)
    assert done.applied == {"compute.precision": "bf16 in Sequential"}
    assert found["seen"] | {"inner": "torch.bfloat16"} == found["seen"]
    assert found["seen"]["output"] == found["weight"] == "torch.float32"
    assert found["keys"] == plain["keys"]
    is_near(found, plain, 0.05)


@pytest.mark.slow
def test_bf16_is_what_an_autocast_around_the_forward_gives(scripts, training):
    written = told(scripts.run(training, arguments=["cast"]))
    assert told(scripts.run(training, "compute.precision=bf16"))["losses"] == written["losses"]


def test_fp32_takes_the_scripts_autocast_off(scripts, training, plain):
    done = scripts.run(training, "compute.precision=fp32", arguments=["cast"])
    assert told(done)["losses"] == plain["losses"]
    assert done.applied == {"compute.precision": "fp32 in place of autocast"}


def test_channels_last(scripts, training, plain):
    done = scripts.run(training, "compute.memory_format=channels_last")
    found = told(done)
    assert done.applied == {"compute.memory_format": "channels_last in Sequential"}
    assert (plain["seen"]["last"], found["seen"]["last"]) == (False, True)
    assert found["losses"] == pytest.approx(plain["losses"], abs=1e-4)


def test_channels_last_where_torchs_group_norm_would_crash(scripts, training, tmp_path):
    """Its input needs no gradient."""
    script = tmp_path / "train.py"
    script.write_text(
        training.read_text()
        .replace("nn.Sequential(", "nn.Sequential(nn.GroupNorm(1, 3), ", 1)
        .replace("model[0]", "model[1]")
    )
    plain = told(scripts.run(script))
    done = scripts.run(script, "compute.memory_format=channels_last")
    assert done.applied == {"compute.memory_format": "channels_last in Sequential"}
    assert told(done)["seen"]["last"]
    assert told(done)["losses"] == pytest.approx(plain["losses"], abs=1e-4)


def test_a_fused_optimizer(scripts, training, plain):
    done = scripts.run(training, "compute.fused_optimizer=on")
    found = told(done)
    assert done.applied == {"compute.fused_optimizer": "fused SGD"}
    assert (plain["fused"], found["fused"]) == (None, True)
    assert found["losses"] == pytest.approx(plain["losses"], abs=1e-5)


@pytest.mark.slow
def test_a_compiled_model(scripts, training, plain):
    done = scripts.run(training, "compute.compile=on", "compute.precision=bf16")
    found = told(done)
    assert done.applied["compute.compile"] == "compiled Sequential"
    assert found["keys"] == plain["keys"]
    is_near(found, plain, 0.05)


COMPILED = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.Adam(model.parameters())
compiled = torch.compile(model, backend="aot_eager")
x, y = torch.randn(8, 4), torch.randint(0, 2, (8,))
for step in range(8):
    optimizer.zero_grad(set_to_none=False)
    nn.functional.cross_entropy(compiled(x), y).backward()
    optimizer.step()
    print(step)
from torch._dynamo.utils import counters
print(counters["stats"]["unique_graphs"], counters["frames"]["total"], counters["frames"]["ok"])
"""


@pytest.mark.slow
def test_frames_that_the_script_has_compiled_are_kept(scripts, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(COMPILED)
    plain = scripts.run(path)
    exact = ["script.zero_grad=set_to_none", "script.garbage=scheduled", "script.log_every=4"]
    cured = scripts.run(path, *exact, "compute.precision=bf16", "script.evaluation=no_grad")
    assert plain.code == cured.code == 0, cured.err
    assert cured.applied["compute.precision"] == "bf16 in OptimizedModule"
    assert cured.out.splitlines()[-1] == plain.out.splitlines()[-1]
