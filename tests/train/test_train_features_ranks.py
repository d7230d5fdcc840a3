"""Ranks of one host share what each of them has computed; hosts have each their own."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "world"))
from world_ranks import run

JOB = """
    import os
    import sys
    from dataclasses import replace

    import torch

    where, hosts = sys.argv[-2:]
    if hosts == "2":  # each rank is alone on its host, with a cache of its own
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        os.environ["FLATOUT_CACHE"] += os.environ["RANK"]

    from torch import nn

    import flatout
    from flatout.train.parts.features import features as kept
    from flatout.train.parts.features.rows import ModelRows
    from flatout.train.parts.features.choice import Choice
    from flatout.world import join

    computed, compute = 0, ModelRows._computed


    def counted(rows, cut, inputs, samples, **more):
        global computed
        computed += samples
        return compute(rows, cut, inputs, samples, **more)


    def choose(options, *rest):
        option = replace(options[0], saved_s=0.9)
        return Choice(option, plain_s=1.0, later_s=0.1, pays_from=2)


    ModelRows._computed = counted
    kept.choose = choose
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(72, 3)
    )
    model[:3].requires_grad_(False)
    x, y = torch.randn(60, 1, 12, 12), torch.randint(0, 3, (60,))
    recipe = flatout.Recipe(input={"features": where}, compute={"precision": "fp32"})
    trainer = flatout.Trainer(model, optimizer="sgd", lr=0.1, recipe=recipe, say=lambda line: None)
    history = trainer.fit(
        x, y, batch_size=12, epochs=8, progress=False, validation_data=(x[:24], y[:24])
    )
    if join().is_first:
        print(model[-1].weight.double().sum().item(), computed)
        print([history.features and history.features["line"], *history.notes])
"""


def fitted(folder, *arguments):
    """Of two ranks a sum of weights, and how many samples the first one computed; lines."""
    said = run(JOB, 2, folder, *arguments)
    figures, line = said[0][0].splitlines()
    weights, computed = figures.split()
    return weights, int(computed), line


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return fitted(tmp_path_factory.mktemp("plain"), "off", "1")


@pytest.mark.slow
def test_two_ranks_learn_the_same_and_share_their_rows(tmp_path, plain):
    weights, computed, line = fitted(tmp_path, "memory", "1")
    assert weights == plain[0]
    # Without sharing, this rank would compute nearly all 60 samples and 12 of the validation.
    assert 30 + 12 <= computed <= 30 + 12 + 12
    assert "hosts" not in line


@pytest.mark.slow
def test_each_host_comes_to_need_all_rows_and_says_so(tmp_path, plain):
    weights, computed, line = fitted(tmp_path, "disk", "2")
    assert weights == plain[0]
    # All of the training's but for a few that were drawn for the other host each time.
    assert 55 + 12 <= computed <= 60 + 12
    assert "each of 2 hosts keeps all rows" in line
