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


def test_a_fused_optimiser(scripts, training, plain):
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
