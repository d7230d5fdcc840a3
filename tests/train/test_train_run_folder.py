"""The run folder that the command gives to a fit which names none."""

import itertools

import numpy as np
import pytest
import torch

import flatout
from flatout.train import run_folder


@pytest.fixture
def given(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "_FITS", itertools.count(1))
    monkeypatch.setenv("FLATOUT_CHECKPOINTS", str(tmp_path / "run"))
    return tmp_path


def fit(epochs, **arguments):
    torch.manual_seed(0)
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(20, 3)).astype(np.float32), rng.integers(0, 2, 20)
    trainer = flatout.Trainer(torch.nn.Linear(3, 2), allow="exact", **arguments)
    trainer.fit((x, y), batch_size=10, epochs=epochs, progress=False)
    return trainer


def test_a_fit_goes_on_from_the_folder_of_the_command(given, monkeypatch):
    whole = fit(3, run=str(given / "own"))
    assert not (given / "run").exists()
    fit(1)
    assert (given / "run/checkpoints").is_dir()
    # As after a preemption: the same command in another process.
    monkeypatch.setattr(run_folder, "_FITS", itertools.count(1))
    again = fit(3)
    assert again.loop.step_count == whole.loop.step_count == 6
    assert torch.equal(again.model.weight, whole.model.weight)


def test_each_fit_of_a_script_has_its_own(given):
    fit(1)
    fit(1)
    assert (given / "run-2/checkpoints").is_dir()
