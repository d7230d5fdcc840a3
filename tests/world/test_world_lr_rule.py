"""A learning-rate rule on several ranks: it is the batch of all of them that counts."""

import pytest
import torch
from world_ranks import run

JOB = """
    import sys
    from pathlib import Path

    import numpy as np
    import torch
    from torch import nn

    import flatout
    from flatout.world import place

    folder, size = Path(sys.argv[1]), int(sys.argv[2])
    rng = np.random.default_rng(1)
    x = rng.normal(size=(101, 20)).astype(np.float32)
    y = rng.integers(0, 5, 101)
    ready = [(x[at : at + 20], y[at : at + 20]) for at in range(0, 100, 20)]
    rule = flatout.LrRule("linear", reference_batch=5, warm_up=1.5)
    found = {}
    for name, data, batch in (("sgd", (x, y), 20), ("lars", (x, y), 20), ("lamb", ready, None)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 5))
        rate = {"sgd": 0.02, "lars": 1.0, "lamb": 0.002}[name]
        trainer = flatout.Trainer(model, optimizer=name, lr=rate, lr_rule=rule, allow="exact")
        history = trainer.fit(data, batch_size=batch, epochs=2, progress=False)
        found[name] = [p.detach() for p in model.parameters()], history.lr_scale.as_dict()
        assert history.batch_size == 20
    torch.save(found, folder / f"{size}-{place().rank}.pt")
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    for size in (1, 2):
        run(JOB, size, folder)
    return {
        (size, rank): torch.load(folder / f"{size}-{rank}.pt")
        for size, rank in ((1, 0), (2, 0), (2, 1))
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sgd", "lars", "lamb"])
def test_two_ranks_do_as_one(found, name):
    weights, scale = found[1, 0][name]
    for rank in (0, 1):
        theirs, their_scale = found[2, rank][name]
        assert their_scale == scale
        for one, other in zip(weights, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert all(map(torch.equal, found[2, 0][name][0], found[2, 1][name][0]))
    assert (scale["batch"], scale["factor"]) == (20, 4.0)
    assert scale["warm_up_steps"] == (8 if name == "lamb" else 9)
