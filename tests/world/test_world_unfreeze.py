"""Layers that train again in the middle of a fit: from then on all ranks' gradients are summed."""

import pytest
import torch
from world_ranks import run

JOB = """
    import sys
    from pathlib import Path

    import torch
    from torch import nn

    import flatout
    from flatout.world import place

    draw = torch.Generator().manual_seed(1)
    x = torch.randn(64, 12, generator=draw)
    y = (x @ torch.randn(12, 3, generator=draw)).argmax(1)


    class ByHand(flatout.Callback):
        def on_epoch_start(self, state):
            if state.epoch == 1:
                flatout.unfreeze(state.model, layers="0")


    def fitted(callbacks, *, given="all", **options):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(12, 16), nn.Tanh(), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 3)
        )
        flatout.freeze(model, until="3")
        parameters = [p for p in model.parameters() if given == "all" or p.requires_grad]
        optimizer = torch.optim.Adam(parameters, lr=0.01)
        trainer = flatout.Trainer(model, optimizer=optimizer, allow="exact", **options)
        trainer.fit(x, y, batch_size=16, epochs=3, progress=False, callbacks=callbacks)
        return model.state_dict()


    folder, size = Path(sys.argv[1]), sys.argv[2]
    found = {
        "by hand": fitted([ByHand()]),
        "a group more": fitted([flatout.Unfreeze(2, layers="0", lr=0.02)], given="trained"),
        "its own group": fitted([flatout.Unfreeze(2, layers="0", lr=0.02)]),
    }
    if place().rank == 0:
        torch.save(found, folder / f"{size}.pt")
"""


@pytest.mark.slow
def test_two_ranks_go_on_as_one(tmp_path):
    for size in (1, 2):
        run(JOB, size, tmp_path, size)
    one, two = (torch.load(tmp_path / f"{size}.pt") for size in (1, 2))
    for name, weights in one.items():
        for key, value in weights.items():
            torch.testing.assert_close(two[name][key], value, rtol=1e-4, atol=1e-5)
    for key, value in one["a group more"].items():
        assert torch.equal(value, one["its own group"][key])
