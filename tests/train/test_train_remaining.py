"""How far a fit is, for the tools of a cluster."""

import json

import numpy as np
import pytest
import torch

import flatout


class Stop(flatout.Callback):
    every = 3

    def on_step(self, state):
        state.stop("enough")


@pytest.mark.parametrize("stops", [False, True])
def test_a_fit_tells_how_far_it_is(tmp_path, monkeypatch, stops):
    path = tmp_path / "remaining"
    monkeypatch.setenv("FLATOUT_REMAINING", str(path))
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(20, 3)).astype(np.float32), rng.integers(0, 2, 20)
    trainer = flatout.Trainer(torch.nn.Linear(3, 2), allow="exact")
    callbacks = [Stop()] if stops else []
    trainer.fit((x, y), batch_size=10, epochs=4, progress=False, callbacks=callbacks)
    said = json.loads(path.read_text())
    assert said["epochs"] == 4
    assert said["progress"] == (pytest.approx(3 / 8) if stops else 1.0)
    assert said["remaining_s"] >= 0


def test_a_file_that_cannot_be_written_costs_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("FLATOUT_REMAINING", str(tmp_path / "none" / "remaining"))
    trainer = flatout.Trainer(torch.nn.Linear(3, 2), allow="exact")
    trainer.fit((torch.zeros(20, 3), torch.zeros(20).long()), batch_size=10, progress=False)
    assert not (tmp_path / "none").exists()
