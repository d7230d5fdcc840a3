"""Evaluations outside of a fit take features that were kept, and give what they give without."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from train_frozen import fitted, frozen, images, watched_cuts, written
from train_jobs import figures, quiet, same

import flatout
from flatout.data.execution import samples
from flatout.data.reading.files import stamp_of, stamps_of
from flatout.data.sources.images import image_files
from flatout.models import Cut, find_cuts
from flatout.recipe import Recipe
from flatout.train.parts.features import features


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


def photographs(tmp_path, *classes):
    """Of 13 gray images for each class."""
    for name in classes:
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(13):
            pixels = np.random.default_rng([ord(name), number]).integers(0, 256, (12, 12))
            path = tmp_path / "photos" / name / f"{number}.png"
            Image.fromarray(pixels.astype(np.uint8)).save(path)
    return tmp_path / "photos"


@pytest.mark.slow
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_images_without_labels_find_what_was_kept_with_them(tmp_path, made, monkeypatch, where):
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))
    folder = photographs(tmp_path, "b", "c", "d")

    def read(**options):
        return flatout.data.images(folder, size=12, channels=1, **options).normalize(0.5, 0.5)

    def four():
        model = frozen()
        model[-1] = nn.Linear(72, 4)
        return model

    trainer, _ = fitted(where, read().shuffle(seed=1).batch(10), model=four())
    plain = evaluated("off", trainer.model)
    unlabeled = read(labels=False).batch(10)
    expected = plain.predict(unlabeled), plain.evaluate(read().batch(10))
    if where == "disk":
        trainer = evaluated("disk", trainer.model)
    del made[:]
    assert torch.equal(trainer.predict(unlabeled), expected[0])
    assert trainer.evaluate(read().batch(10)) == expected[1]
    assert computed(made) < 20
    with monkeypatch.context() as patch:
        asked = []
        patch.setattr(image_files, "stamp_of", lambda path: asked.append(path) or stamp_of(path))
        patch.setattr(samples, "stamps_of", lambda paths: asked.extend(paths) or stamps_of(paths))
        assert torch.equal(trainer.predict(unlabeled), expected[0])
        assert sorted(asked) == sorted(map(str, folder.rglob("*.png")))  # each once
    if where == "disk":  # a class in front of them: other labels, the same rows
        photographs(tmp_path, "a")
        data = read().shuffle(seed=1).batch(10)
        plain, expected = fitted("off", data, model=four())
        del made[:]
        trainer, history = fitted("disk", data, model=four())
        assert same(trainer.model, plain.model)
        assert figures(history) == figures(expected)
        assert 13 <= computed(made) < 39


@pytest.mark.slow
def test_what_a_function_made_of_labels_is_not_found_without_them(tmp_path, made, monkeypatch):
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))
    folder = photographs(tmp_path, "b", "c", "d")

    def shifted(x, y=0):
        return (x + y) / 255, y

    data = flatout.data.images(folder, size=12, channels=1).map(shifted)
    fitted("disk", data.shuffle(seed=1).batch(10))
    unlabeled = (
        flatout.data.images(folder, size=12, channels=1, labels=False).map(shifted).batch(10)
    )
    expected = evaluated("off").predict(unlabeled)
    assert torch.equal(evaluated("disk").predict(unlabeled), expected)


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


def loader(samples=None):
    return DataLoader(TensorDataset(*images()) if samples is None else samples, 10)


def test_what_a_loader_gives_again_is_kept(made):
    trainer, plain = evaluated("memory"), evaluated("off")
    expected, outputs = plain.evaluate(loader()), plain.predict(loader())
    counts = []
    for _ in range(4):
        del made[:]
        assert trainer.evaluate(loader()) == expected
        counts.append(computed(made))
    assert counts[0] == 0  # not even looked for
    assert counts[1] >= 50 > 20 > counts[2] >= counts[3]
    del made[:]
    assert torch.equal(trainer.predict(loader()), outputs)
    assert computed(made) < 20


class Drawn(Dataset):
    """Samples that are others each time."""

    def __len__(self):
        return 50

    def __getitem__(self, number):
        x, y = (part[number] for part in images())
        return x + torch.rand(()), y


@pytest.mark.slow
def test_what_a_loader_changes_at_random_is_evaluated_as_it_comes(made, tmp_path, monkeypatch):
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))
    trainer, plain = evaluated("disk"), evaluated("off")
    for seed in range(5):
        torch.manual_seed(seed)
        expected = plain.evaluate(loader(Drawn()))
        torch.manual_seed(seed)
        assert trainer.evaluate(loader(Drawn())) == expected
    assert not list((tmp_path / "cache" / "features").glob("*/"))


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
