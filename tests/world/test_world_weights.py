"""Weights of classes and samples, and several losses, are exact on one rank, two and three."""

import pytest
import torch
from world_ranks import run

pytestmark = pytest.mark.slow

JOB = """
    import sys
    from pathlib import Path

    import torch
    from torch import nn

    import flatout
    from flatout.recipe import Memory, Recipe

    folder, size = Path(sys.argv[1]), int(sys.argv[2])
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(101, 12, generator=draw)
    kinds = torch.randint(0, 3, (101,), generator=draw)
    some = kinds.clone()
    some[torch.rand(101, generator=draw) < 0.5] = -100  # not equally many in each part
    some[:25] = -100
    numbers = x[:, :1] * 2
    weights = torch.rand(101, generator=draw)


    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.body, self.kind = nn.Linear(12, 8), nn.Linear(8, 3)
            self.size = nn.Linear(8, 1)

        def forward(self, x):
            h = self.body(x).tanh()
            return {"kind": self.kind(h), "size": self.size(h)}


    def one():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3))


    def fitted(model, y, options, **fit):
        # 101 = 4 * 25 + 1: the last batch is smaller than the world.
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        job = flatout.Trainer(model, optimizer=optimizer, allow="exact", **options)
        history = job.fit(x, y, batch_size=25, epochs=2, progress=False, **fit)
        figures = {k: v for k, v in history.epochs[-1].items() if k != "seconds"}
        evaluated = job.evaluate(x, y, sample_weight=weights)
        figures |= {f"evaluated_{name}": value for name, value in evaluated.items()}
        return {"model": model.state_dict(), "figures": figures}


    two = {
        "loss": {"kind": "cross_entropy", "size": "mse"},
        "loss_weights": {"size": 0.3},
        "metrics": {"kind": ["accuracy"], "size": ["mae"]},
    }
    both = {"kind": some, "size": numbers}
    small = {"recipe": Recipe(memory=Memory(micro_batch=3))}
    classes = {0: 0.5, 2: 4.0}
    found = {
        "classes": fitted(one(), some, {}, class_weight=classes),
        "samples": fitted(one(), kinds, {}, sample_weight=weights, validation_split=0.2),
        "classes and samples": fitted(
            one(), kinds, {}, class_weight=classes, sample_weight=weights
        ),
        "several": fitted(Two(), both, two),
        "several in parts": fitted(Two(), both, {**two, **small}),
        "several accumulated": fitted(Two(), both, {**two, "accumulate": 2}),
        "several, weighted": fitted(
            Two(), both, two, class_weight={"kind": classes}, sample_weight=weights
        ),
    }
    from flatout.world import place

    if place().rank == 0:
        torch.save(found, folder / f"found{size}.pt")
"""


def test_any_number_of_ranks_gives_what_one_gives(tmp_path):
    for size in (1, 2, 3):
        run(JOB, size, tmp_path, tmp_path)
    alone, *others = (torch.load(tmp_path / f"found{size}.pt") for size in (1, 2, 3))
    for found in others:
        for name, expected in alone.items():
            for key, value in expected["model"].items():
                torch.testing.assert_close(
                    found[name]["model"][key], value, rtol=1e-5, atol=1e-6, msg=f"{name}: {key}"
                )
            assert found[name]["figures"] == pytest.approx(expected["figures"], rel=1e-4), name
