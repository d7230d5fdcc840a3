"""Evaluations outside of a fit take features that were kept, and give what they give without."""

import numpy as np
import pytest
import torch
from torch import nn
from train_frozen import fitted, frozen, images, watched_cuts, written
from train_jobs import quiet, same

import flatout
from flatout.models import Cut, find_cuts
from flatout.recipe import Recipe
from flatout.train import features


@pytest.fixture
def made(monkeypatch):
    """All cuts that were looked at."""
    return watched_cuts(monkeypatch)


def evaluated(where, model=None, **options):
    recipe = Recipe(input={"features": where})
    given = {"optimizer": "sgd", "metrics": ["accuracy"], "say": quiet, **options}
    return flatout.Trainer(frozen() if model is None else model, recipe=recipe, **given)


def computed(cuts):
    return sum(cut.computed for cut in cuts)


def convolved(monkeypatch):
    """How many samples each call of a convolution had."""
    counts = []
    run = nn.Conv2d._conv_forward

    def counted(layer, x, *rest):
        counts.append(len(x))
        return run(layer, x, *rest)

    monkeypatch.setattr(nn.Conv2d, "_conv_forward", counted)
    return counts


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_what_a_fit_has_kept_in_memory_is_used_after_it(made, monkeypatch, precision):
    x, y = images()
    given = {"validation_data": (x[:40], y[:40]), "precision": precision}
    trainer, _ = fitted("memory", **given)
    plain, _ = fitted("off", **given)
    plain.model.load_state_dict(trainer.model.state_dict())
    before = computed(made)
    for data in ((x[:40], y[:40]), (x, y)):
        assert trainer.evaluate(data) == plain.evaluate(data)
    # What comes without targets, or with others, has the same features.
    others = (x, 2 - y, torch.arange(len(x)) / len(x))
    pipeline = flatout.data.arrays(x).batch(25)
    expected = plain.predict(x), plain.predict(pipeline), plain.evaluate(others)
    with monkeypatch.context() as patch:
        counts = convolved(patch)
        assert torch.equal(trainer.predict(x), expected[0])
        assert torch.equal(trainer.predict(pipeline), expected[1])
        assert trainer.evaluate(others) == expected[2]
        assert max(counts) == 2  # to see what the features of these inputs look like
    # A few to look at, and none of the samples.
    assert computed(made) - before < 40
    assert "_call_impl" not in vars(trainer.model)
    assert trainer.model.training
    for model in (plain.model, trainer.model):
        with torch.no_grad():
            model[0].weight.mul_(2)
    assert trainer.evaluate((x, y)) == plain.evaluate((x, y))


def test_another_trainer_finds_what_is_on_the_disk(tmp_path, made, monkeypatch):
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))
    data = written(tmp_path, 40).batch(10)
    before = evaluated("off")
    expected = before.evaluate(data), before.predict(data)
    evaluated("disk").evaluate(data)
    assert not made  # nothing is looked for where nothing was kept
    fitted("disk", data)
    said = []
    trainer = evaluated("disk", say=said.append)
    del made[:]
    assert trainer.evaluate(data) == expected[0]
    assert torch.equal(trainer.predict(data), expected[1])
    assert computed(made) < 20
    assert said.count("features: kept behind 5 (Flatten) of 40 samples") == 1
    assert same(trainer.model, before.model)


def test_what_is_evaluated_again_is_kept(made):
    x, y = images()
    trainer, plain = evaluated("memory"), evaluated("off")
    expected = plain.evaluate((x, y))
    counts = []
    for _ in range(4):
        del made[:]
        assert trainer.evaluate((x, y)) == expected
        counts.append(computed(made))
    assert counts[0] == 0  # not even looked for
    assert counts[1] >= 50 > 20 > counts[2] >= counts[3]
    x[3] += 1
    assert trainer.evaluate((x, y)) == plain.evaluate((x, y))


def test_off_few_samples_and_exact_bits_look_for_nothing(made):
    x, y = images()
    for trainer in (evaluated("off"), evaluated("memory", allow="exact")):
        for _ in range(3):
            trainer.evaluate((x, y))
    few = evaluated("memory")
    for _ in range(3):
        few.evaluate((x[:20], y[:20]))
    assert not made


@pytest.mark.parametrize("compiled", [True, False])
def test_keras_models_take_features_too(made, monkeypatch, compiled):
    keras = pytest.importorskip("keras")
    monkeypatch.setattr(features, "find_cuts", find_cuts)
    counts = []
    prefix = Cut.prefix
    monkeypatch.setattr(Cut, "prefix", lambda cut, x: counts.append(len(x)) or prefix(cut, x))
    x, y = images()
    x = x.permute(0, 2, 3, 1).contiguous()
    keras.utils.set_random_seed(0)
    base = keras.Sequential([keras.layers.Input((12, 12, 1)), keras.layers.Conv2D(4, 3)])
    base.trainable = False
    inputs = keras.layers.Input((12, 12, 1))
    model = keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Flatten()(base(inputs))))
    given = {"optimizer": "sgd"}
    if compiled:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer="sgd", loss=loss)
        given = {"optimizer": None, "metrics": ()}
    plain = evaluated("off", model, **given)
    expected, outputs = plain.evaluate(x, y, batch_size=50), plain.predict(x)
    trainer = evaluated("memory", model, **given)
    for _ in range(3):
        counts.clear()
        assert trainer.evaluate(x, y, batch_size=50) == expected
    assert sum(counts) < 20
    counts.clear()
    for _ in range(2):
        assert np.array_equal(trainer.predict(x), outputs)  # the same inputs, without targets
    assert 0 < sum(counts) < 20
