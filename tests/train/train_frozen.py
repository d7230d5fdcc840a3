"""Fits of a model whose leading layers are frozen."""

import torch
import train_cuts
from torch import nn
from train_jobs import quiet

import flatout
from flatout.recipe import Recipe
from flatout.train.parts.features import features
from flatout.train.parts.features.choice import Choice
from flatout.train.terms import TERMS


def watched_cuts(monkeypatch):
    """A list of all cuts that are looked at; the last is chosen, however short the run."""
    cuts = []

    def find_cuts(model, inputs, most):
        found = train_cuts.find_cuts(model, inputs, most)
        cuts.extend(found.cuts)
        return found

    def choose(options, samples, epochs, plain_s):
        best = min(options, key=lambda one: one.bytes)
        return Choice(best, "", plain_s, plain_s / 10, 2, best.bytes * samples * best.variants)

    monkeypatch.setattr(features, "find_cuts", find_cuts)
    monkeypatch.setattr(features, "choose", choose)
    return cuts


def frozen():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(72, 3),
    )
    model[:5].requires_grad_(False)
    return model


def images(samples=50):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 1, 12, 12, generator=draw)
    return x, torch.randint(0, 3, (samples,), generator=draw)


def fitted(
    where, data=None, *, model=None, say=quiet, lr=0.01, precision="fp32", terms=TERMS, **options
):
    model = frozen() if model is None else model
    recipe = Recipe(input={"features": where}, compute={"precision": precision})
    trainer = flatout.Trainer(
        model, optimizer="sgd", lr=lr, metrics=["accuracy"], recipe=recipe, say=say
    )
    trainer.terms = terms
    given = {"batch_size": 10, "epochs": 3, "progress": False, **options}
    return trainer, trainer.fit(images() if data is None else data, **given)


def written(tmp_path, samples=30):
    x, y = images(samples)
    source = flatout.data.Pipeline(flatout.data.arrays(x, y))
    done = flatout.data.convert(source, tmp_path / "x.tfrecord", progress=False)
    return flatout.data.tfrecord(done.files, schema=done.schema).shuffle(seed=1)
