"""Where another device runs than was asked for, everything that tells of the run says so."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from train_jobs import data, network, quiet

import flatout
from flatout.devices import pin
from flatout.errors import DeviceError
from flatout.recipe import Recipe, load
from flatout.train.rank_device import device_here

pytestmark = pytest.mark.usefixtures("one_thread")

MISSING = f"cuda:{torch.cuda.device_count() + 1}"


def fit(trainer, **options):
    return trainer.fit(data(), batch_size=64, progress=False, **options)


def trainer(model=None, placement="soft", device=MISSING, **options):
    recipe = Recipe(world={"device": device, "placement": placement})
    return flatout.Trainer(model or network(), recipe=recipe, **{"say": quiet, **options})


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would stand in")
def test_the_recipe_and_the_history_name_what_ran_and_why(tmp_path):
    said = []
    job = trainer(run=tmp_path, say=said.append)
    history = fit(job)
    file = load(tmp_path / "recipe.toml")
    kept = json.loads((tmp_path / "history.json").read_text())["recipe"]
    for recipe in (job.resolved, history.recipe, file):
        assert recipe.world.device == "cpu"
        assert recipe.choices["world.device"].value == "cpu"
        assert recipe.choices["world.device"].reason.startswith(f"instead of {MISSING}, which")
        assert "cpu" in recipe.summary()
        assert any(change.field == "world.device" for change in recipe.changes())
    assert kept["values"]["world.device"] == "cpu"
    assert kept["reasons"]["world.device"].startswith(f"instead of {MISSING}")
    assert said[0].startswith(f"running on cpu instead of {MISSING}, which cannot be used")
    assert said[0] in history.notes
    decided = [line for line in said if line.startswith("auto: ")]
    assert decided
    assert not any(MISSING in line for line in decided)
    # Going on it asks again: the same falls back in the same way, and that is no difference.
    said.clear()
    again = trainer(run=tmp_path, say=said.append)
    fit(again, epochs=2, resume=True)
    assert again.resolved.world.device == "cpu"
    assert again.resolved.choices["world.device"].reason.startswith(f"instead of {MISSING}")
    assert not any("settings differ" in line for line in said)
    assert again.history.notes.count(history.notes[0]) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would stand in")
def test_an_evaluation_before_any_fit_says_it_too():
    said = []
    trainer(say=said.append).evaluate(data())
    assert said[0].startswith(f"running on cpu instead of {MISSING}")


def pinned():
    return nn.Sequential(pin(nn.Linear(12, 16), MISSING), nn.ReLU(), nn.Linear(16, 3))


def test_a_pin_to_a_missing_device_is_soft_unless_placement_is_strict():
    said, job = [], trainer(pinned(), device="cpu", say=lambda line: said.append(line))
    history = fit(job)
    words = (
        f"0 runs on cpu instead of {MISSING}, to which it is pinned and which cannot be used here"
    )
    assert said[0] == words
    assert words in history.notes
    assert "instead of" in job.loop.placement.describe()
    with pytest.raises(DeviceError, match="a Linear is pinned to"):
        fit(trainer(pinned(), "strict", "cpu"))
    with pytest.raises(DeviceError, match="a Linear is pinned to"):
        trainer(pinned(), "strict", "cpu").evaluate(data())


def test_a_strict_device_is_no_other():
    with pytest.raises(DeviceError, match=f"{MISSING} is asked for and cannot be used"):
        fit(trainer(placement="strict"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would stand in")
def test_ranks_that_ask_for_gpus_fall_back_together(monkeypatch):
    ranks = SimpleNamespace(local_world_size=2, local_rank=1)
    monkeypatch.setattr("flatout.train.rank_device.place", lambda: ranks)
    device, why = device_here(trainer(device="cuda").loop.asked.recipe.world)
    assert (device.type, why[:15]) == ("cpu", "instead of cuda")
    with pytest.raises(DeviceError, match="2 ranks on this node, but 0 GPUs"):
        device_here(trainer(device="cuda", placement="strict").loop.asked.recipe.world)
