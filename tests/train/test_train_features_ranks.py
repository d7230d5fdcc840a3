"""Ranks of one host share what each of them has computed."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "world"))
from world_ranks import run

JOB = """
    import sys

    import torch

    sys.path.insert(0, {folder!r})
    import train_cuts
    from torch import nn

    import flatout
    from flatout.train import features as kept
    from flatout.train.frozen_choice import Choice
    from flatout.world import join

    where = sys.argv[-1]
    cuts = []


    def find_cuts(model, inputs, most):
        found = train_cuts.find_cuts(model, inputs, most)
        cuts.extend(found.cuts)
        return found


    kept.find_cuts = find_cuts
    kept.choose = lambda options, *rest: Choice(options[-1], plain_s=1.0, later_s=0.1, pays_from=2)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(72, 3)
    )
    model[:3].requires_grad_(False)
    x, y = torch.randn(60, 1, 12, 12), torch.randint(0, 3, (60,))
    recipe = flatout.Recipe(input={{"features": where}}, compute={{"precision": "fp32"}})
    trainer = flatout.Trainer(model, optimizer="sgd", lr=0.1, recipe=recipe, say=lambda line: None)
    trainer.fit(x, y, batch_size=12, epochs=6, progress=False, validation_data=(x[:24], y[:24]))
    if join().is_first:
        computed = max([cut.computed for cut in cuts], default=0)
        print(model[-1].weight.double().sum().item(), computed)
"""


@pytest.mark.slow
def test_two_ranks_learn_the_same_and_share_their_rows(tmp_path):
    job = JOB.format(folder=str(Path(__file__).parent))
    found = {}
    for where in ("off", "memory"):
        said = run(job, 2, tmp_path, where)
        found[where] = said[0][0].split()
    assert found["off"][0] == found["memory"][0]
    # Without sharing, this rank would compute nearly all 60 samples and 12 of the validation.
    assert 30 <= int(found["memory"][1]) <= 30 + 12 + 12 + 13
