"""With dropout keyed by sample a fit is the same in pieces, accumulated, resumed, in any layout."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from train_jobs import CLASSES, FEATURES, close, convnet, data, figures, images, quiet, same

import flatout
from flatout.data.batches.batch import Batch
from flatout.errors import DataError, ModelError, NumbersError, RecipeError
from flatout.recipe import Compute, ModelFacts, Parity, Recipe, of_change
from flatout.strategies import Ddp
from flatout.strategies.reductions.collectives import AllReduce
from flatout.train.loop import Loop
from flatout.train.sample_dropout import sample_dropout
from flatout.world import ONE, Place, World

pytestmark = pytest.mark.usefixtures("one_thread")


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(FEATURES, 32),
        nn.Dropout(0.5),
        nn.ReLU(),
        nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.2, inplace=True)),
        nn.Linear(32, CLASSES),
    )


def keyed(**fields):
    return Recipe().replace(
        {"compute.dropout": "by_sample", **{k.replace("__", "."): v for k, v in fields.items()}}
    )


def fit(model, recipe, train=None, *, batch_size=32, epochs=2, resume=False, **given):
    trainer = flatout.Trainer(
        model, lr=0.01, **{"recipe": recipe, "allow": "exact", "say": quiet, **given}
    )
    history = trainer.fit(
        data() if train is None else train,
        batch_size=batch_size,
        epochs=epochs,
        resume=resume,
        progress=False,
    )
    return trainer, history


@pytest.fixture(scope="module")
def whole():
    return fit(network(), keyed())[0].model


@pytest.mark.parametrize("size", [1, 7, 32])
def test_micro_batches(whole, size):
    torch.manual_seed(size)  # torch's generator has no say
    model = network()
    torch.manual_seed(size)
    assert close(fit(model, keyed(memory__micro_batch=size))[0].model, whole)


@pytest.mark.parametrize("accumulate", [2, 4])
def test_accumulated(whole, accumulate):
    found = fit(network(), keyed(), batch_size=32 // accumulate, accumulate=accumulate)
    assert close(found[0].model, whole)


def test_recomputed_bit_for_bit(whole):
    assert same(fit(network(), keyed(memory__activation_checkpointing="on"))[0].model, whole)


def test_bit_for_bit_by_torchs_operators(whole, monkeypatch):
    monkeypatch.setattr("flatout.kernels.dropout._c", None)
    assert same(fit(network(), keyed())[0].model, whole)


def test_another_seed_and_torchs_own_are_others(whole):
    rows = flatout.data.as_source(*data(), batch_size=32, shuffle=False)
    found = [fit(network(), keyed(), rows, batch_size=None, seed=seed)[0].model for seed in (0, 1)]
    assert not close(*found)
    assert not close(fit(network(), Recipe())[0].model, whole)


class RunsOut(nn.Module):
    """Has memory for some samples only."""

    def __init__(self, most):
        super().__init__()
        self.inner, self.most = network(), most

    def forward(self, x):
        y = self.inner(x)
        if torch.is_grad_enabled() and len(x) > self.most:
            raise MemoryError
        return y


def test_a_batch_that_was_split_because_memory_ran_out(whole):
    trainer, history = fit(RunsOut(10), keyed())
    assert "micro-batches" in history.notes[0]
    assert close(trainer.model.inner, whole)


@pytest.mark.parametrize("step", [3, 5])
def test_resumed_in_an_epoch_bit_for_bit(tmp_path, step):
    """Five steps are an epoch."""
    fields = {"save__every": 1, "save__keep_last": 20}
    first, history = fit(network(), keyed(**fields), run=tmp_path)
    torch.manual_seed(99)
    model = network(7)
    again, later = fit(model, keyed(**fields), run=tmp_path, resume=f"step-{step:09d}")
    assert same(first.model, again.model)
    assert figures(history)[-1] == figures(later)[-1]


def test_memory_formats_and_rewrites():
    """torch's own dropout on images falls otherwise where they lie otherwise."""
    norm = nn.Identity()

    def pictures():
        model = convnet()
        model[3] = norm
        return model

    plain = fit(pictures(), keyed(), images(), batch_size=16)[0].model
    for fields in (
        {"compute__memory_format": "channels_last"},
        {"compute__memory_format": "channels_last", "compute__rewrites": "on"},
        {"compute__memory_format": "channels_last", "memory__micro_batch": 5},
    ):
        assert close(fit(pictures(), keyed(**fields), images(), batch_size=16)[0].model, plain)


def test_it_is_only_done_when_asked_and_says_what_it_changes():
    _, history = fit(network(), Recipe(), allow="redrawn")
    assert history.recipe.compute.dropout == "torch"
    _, history = fit(network(), keyed(memory__micro_batch=8))
    assert history.recipe.choices["compute.dropout"].parity is Parity.REDRAWN
    assert history.recipe.choices["memory.micro_batch"].parity is Parity.TOLERANT


def test_evaluation_and_the_model_afterwards():
    trainer, _ = fit(network(), keyed())
    model = trainer.model
    assert not any("forward" in vars(module) for module in model.modules())
    x, y = data()
    model.eval()
    expected = nn.functional.cross_entropy(model(x), y).item()
    assert trainer.evaluate(x, y)["loss"] == pytest.approx(expected, rel=1e-5)


class Written(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = network()

    def forward(self, x):
        return nn.functional.dropout(self.inner(x), 0.1, self.training)


def test_a_written_forward_counts_as_drawing():
    facts = ModelFacts()
    batch = Batch(*data(samples=4), None, None, 4)
    model = nn.Sequential(nn.Linear(FEATURES, CLASSES), Drops())
    found, facts = sample_dropout(
        keyed(), model, 0, lambda batch: model(batch.inputs).sum(), [batch], facts, ONE, quiet
    )
    found.close()
    assert of_change("compute.dropout", "torch", "by_sample", facts) is Parity.REDRAWN
    assert of_change("memory.micro_batch", "whole", 2, facts) is Parity.TOLERANT


class Drops(nn.Module):
    def forward(self, x):
        return nn.functional.dropout(x, 0.1, self.training)


class Noise(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x)


def test_what_else_draws_is_named():
    said = []
    model = nn.Sequential(network(), nn.Sequential(Noise()), nn.Dropout(0.1))
    _, history = fit(model, keyed(memory__micro_batch=8), say=said.append)
    assert any(line.startswith("1.0 (Noise) draws random numbers") for line in said)
    assert history.recipe.choices["memory.micro_batch"].parity is Parity.REDRAWN


class Undefined(nn.Module):
    """The logarithm of what is left: infinite where nothing is."""

    def __init__(self):
        super().__init__()
        self.scale, self.drop = nn.Linear(FEATURES, CLASSES), nn.Dropout(0.3)

    def forward(self, x):
        return self.drop(self.scale(x).exp()).log()


def test_the_numbers_guard_drops_the_same_again():
    with pytest.raises(NumbersError, match=r"output of module model \(Undefined\)"):
        fit(Undefined(), keyed(), batch_size=8, accumulate=2)


def test_compiling_is_refused():
    with pytest.raises(RecipeError, match=r"compute\.dropout = by_sample has no effect in code"):
        fit(network(), keyed(compute__compile="on"))


class Rows(nn.Module):
    """Samples as columns, and a dropout for two shapes."""

    def __init__(self):
        super().__init__()
        self.inner, self.drop = network(), nn.Dropout(0.1)

    def forward(self, x):
        return self.inner(self.drop(self.drop(x).T).T)


def test_a_layer_that_cannot_be_keyed_is_refused_and_the_model_left_as_it_was():
    model = Rows()
    with pytest.raises(ModelError, match=r"drop \(Dropout\) is given"):
        fit(model, keyed())
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_loop_without_data_takes_samples_to_come_first(whole):
    model = network()
    loop = Loop(keyed(), allow="exact", say=quiet)
    loop.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
    source = flatout.data.as_source(*data(), batch_size=32)
    for _ in loop.epochs(2):
        for batch in loop.batches(source):
            loop.step(
                lambda batch: nn.functional.cross_entropy(model(batch.inputs), batch.targets), batch
            )
    loop.close()
    assert close(model, whole)


def test_on_several_ranks_a_batch_of_ones_own_has_to_tell_its_place():
    model = network()
    loop = Loop(Recipe(compute=Compute(dropout="by_sample")), say=quiet)
    loop.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    two = World(Place(0, 2, 0, 2))  # asked for nothing: the step is refused before
    loop.stepper.meet(two)
    reduction = AllReduce(None).started(torch.device("cpu"))
    loop.stepper.train_with(two, 8.0, Ddp(two, model, reduction))
    with pytest.raises(DataError, match="the position of these samples in the batch of all ranks"):
        loop.step(lambda batch: model(batch.inputs).sum(), Batch(data()[0], None, None, None, 150))
    loop.close()


@pytest.mark.slow
@pytest.mark.parametrize("is_compiled", [True, False])
def test_keras_layers_without_a_seed_are_keyed_and_others_named(is_compiled, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "torch":
        pytest.skip("Keras runs on another backend here")
    x, y = (part.numpy() for part in data())

    def fitted(micro_batch, **given):
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(16), keras.layers.Dropout(0.4, **given)]
        model = keras.Sequential([*layers, keras.layers.Dense(CLASSES)])
        model.build((None, FEATURES))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        if is_compiled:
            model.compile("adam", loss)
        said, recipe = [], keyed(memory__micro_batch=micro_batch)
        trainer = flatout.Trainer(model, recipe=recipe, allow="exact", say=said.append)
        quietly = {"verbose": 0} if is_compiled else {"progress": False}
        trainer.fit(x, y, batch_size=32, epochs=2, **quietly)
        return [torch.as_tensor(weight) for weight in model.get_weights()], said

    for whole, pieces in zip(fitted("whole")[0], fitted(5)[0], strict=True):
        torch.testing.assert_close(whole, pieces, rtol=1e-5, atol=1e-6)
    named = "(Dropout) draws random numbers independently of the sample"
    assert any(named in line for line in fitted("whole", seed=3)[1])
