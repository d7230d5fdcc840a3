"""A loop of one's own takes kept features where its code calls a module with a batch's inputs."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from train_frozen import frozen, images, watched_cuts, written
from train_jobs import quiet, same

import flatout
from flatout.models import find_cuts
from flatout.recipe import Recipe
from flatout.train import features


@pytest.fixture(autouse=True)
def made(monkeypatch):
    """All cuts that were looked at."""
    return watched_cuts(monkeypatch)


def plainly(model, batch):
    return F.cross_entropy(model(batch.inputs), batch.targets)


def looped(where, compute=plainly, *, model=None, data=None, epochs=4, say=quiet, each=None):
    """A model trained by a user's loop, and the mean loss of each epoch."""
    model = frozen() if model is None else model
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.01)
    recipe = Recipe(input={"features": where}, compute={"precision": "fp32"})
    source = flatout.data.as_source(images(), batch_size=10, seed=0) if data is None else data
    loop = flatout.Loop(recipe=recipe, say=say)
    run = lambda batch: compute(model, batch)  # noqa: E731
    loop.prepare(model, optimizer, compute=run, data=source, steps=5 * epochs)
    losses = []
    for _ in loop.epochs(epochs):
        for batch in loop.batches(source):
            if each is not None:
                each(model, batch, loop)
            loop.step(run, batch)
        losses.append(loop.mean_loss())
    loop.close()
    return model, losses


def compared(compute=plainly, **options):
    plain, expected = looped("off", compute, **{**options, "say": quiet})
    model, losses = looped("memory", compute, **options)
    assert same(model, plain)
    assert losses == expected


def test_the_model_is_called_as_ever_and_computes_each_sample_once(made):
    seen = []
    compared(each=lambda model, batch, loop: seen.append((batch.inputs.shape, len(batch.inputs))))
    assert set(seen) == {((10, 1, 12, 12), 10)}
    assert made[-1].computed <= 50 + 10 + 1


def test_samples_of_a_pipeline_that_are_kept_are_not_made(tmp_path, made):
    def moved(model, batch):
        return F.cross_entropy(model(batch.inputs.to("cpu").float()), batch.targets.to("cpu"))

    compared(moved, data=written(tmp_path, 50).batch(10))
    assert made[-1].computed <= 50 + 10 + 1


@pytest.mark.parametrize("source", ["arrays", "pipeline"])
def test_a_loop_that_reads_its_inputs_too_gets_them(tmp_path, made, source):
    """Beside the model, and from an epoch on in which none would be made."""
    epochs = []

    def both(model, batch):
        loss = plainly(model, batch)
        return loss + (1e-3 * batch.inputs.mean() if epochs.count(1) > 12 else 0)

    def each(model, batch, loop):
        epochs.append(1)

    data = None if source == "arrays" else written(tmp_path, 50).batch(10)
    found = []
    for where in ("off", "memory"):
        epochs.clear()
        found.append(looped(where, both, data=data, each=each))
    assert same(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    assert made[-1].computed <= 50 + 10 + 1


def noisy(model, batch):
    return F.cross_entropy(model(batch.inputs + 0.5), batch.targets)


def changed(model, batch):
    batch.inputs.mul_(0.5)
    return plainly(model, batch)


def learned(model, batch):
    with torch.enable_grad():  # it is looked at once without
        x = batch.inputs.requires_grad_()
        loss = plainly(model, batch)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + slope.square().sum()


@pytest.mark.parametrize("compute", [noisy, changed, learned])
def test_other_inputs_than_the_batchs_are_computed(compute):
    compared(compute, data=flatout.data.as_source(images(), batch_size=10, seed=0))


def test_layers_that_the_loop_lets_train_in_an_epoch_are_computed():
    def each(model, batch, loop):
        if loop.step_count == 12:
            model[3].requires_grad_(True)
            with torch.no_grad():
                model[0].weight.mul_(1.5)

    compared(each=each)


class Two(nn.ModuleDict):
    """A backbone that is frozen as a whole, and a head."""

    def __init__(self):
        whole = frozen()
        super().__init__({"backbone": whole[:6], "head": whole[6:]})


def test_a_backbone_and_a_head_are_two_modules(monkeypatch):
    monkeypatch.setattr(features, "find_cuts", find_cuts)
    ran = []
    said = []

    def compute(model, batch):
        with torch.no_grad():
            x = model["backbone"](batch.inputs)
        return F.cross_entropy(model["head"](x), batch.targets)

    plain, expected = looped("off", compute, model=Two())
    model = Two()
    conv = type(model["backbone"][0])
    forward = conv.forward
    monkeypatch.setattr(conv, "forward", lambda self, x: ran.append(len(x)) or forward(self, x))
    trained, losses = looped("memory", compute, model=model, say=said.append)
    assert same(trained, plain)
    assert losses == expected
    assert any("features: kept" in line for line in said)
    assert sum(ran) < 2 * 50 * 3  # two layers, of which four epochs would run each sample


def test_another_call_is_named():
    said = []
    looped("memory", noisy, say=said.append)
    told = "features: nothing kept: the loop calls no module with a batch's inputs and nothing else"
    assert said.count(told) == 1


def test_keras_models_are_for_a_trainer():
    keras = pytest.importorskip("keras")
    layers = [keras.layers.Flatten(), keras.layers.Dense(4), keras.layers.Dense(3)]
    layers[1].trainable = False
    model = keras.Sequential([keras.Input((1, 12, 12)), *layers])
    said = []
    looped("memory", model=model, say=said.append)
    assert (
        said.count("features: nothing kept: a Loop keeps none of Keras models; a Trainer does") == 1
    )


def test_micro_batches_and_gathered_batches_take_their_rows(made):
    def halves(model, batch):
        parts = [plainly(model, part) for part in batch.split(2)]
        return sum(parts) / 2

    compared(halves)
    assert made[-1].computed <= 50 + 10 + 1


class Drawn(torch.utils.data.Dataset):
    """The same images, of which some are mirrored at random each time."""

    def __init__(self, is_random):
        self.images, self.is_random = images(), is_random

    def __len__(self):
        return len(self.images[0])

    def __getitem__(self, number):
        x, y = (part[number] for part in self.images)
        return (x + 0.1 * torch.rand(()) if self.is_random else x), y


def loader(is_random=False):
    order = torch.Generator().manual_seed(0)
    made = torch.utils.data.DataLoader(Drawn(is_random), 10, shuffle=True, generator=order)
    return flatout.data.as_source(made)


def test_samples_of_a_loader_are_known_by_their_bytes(made):
    said = []
    plain, expected = looped("off", data=loader())
    model, losses = looped("memory", data=loader(), say=said.append)
    assert same(model, plain)
    assert losses == expected
    assert made[-1].computed <= 50 + 10 + 1
    assert any(line.startswith("features: kept behind") for line in said)


def test_samples_that_a_loader_changes_at_random_are_kept_for_an_epoch_only():
    results, said = [], []
    for where in ("off", "memory"):
        torch.manual_seed(3)
        results.append(looped(where, data=loader(is_random=True), say=said.append))
    assert same(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]
    told = "features: samples change at random: none comes again, so none is kept"
    assert said.count(told) == 1
