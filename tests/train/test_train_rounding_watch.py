"""bf16 that `auto` chose: left where it is no longer rounding, and only there."""

import copy
import sys

import pytest
import torch
from torch import nn

import flatout
from flatout.data.source import as_source
from flatout.recipe import Recipe
from flatout.train.loop import Loop
from flatout.train.part import Step
from flatout.world import Place, World

STEPS_OF_EPOCH = 4


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """Two wait for one another where others compute, too."""


class Spoiled(nn.Module):
    """A layer that bf16 turns around while `spoils`."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(16, 1)
        self.spoils, self.sizes = False, None

    def forward(self, x):
        if self.sizes is not None and len(x) not in self.sizes:
            raise RuntimeError(f"this takes {self.sizes} samples")
        sign = -1 if self.spoils and torch.is_autocast_enabled("cpu") else 1
        return sign * self.layer(x)


def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64 * STEPS_OF_EPOCH, 16, generator=generator)
    return x, x @ torch.randn(16, 1, generator=generator)


def job(model, precision="auto", rate=0.1, samples=None):
    """A Loop in bf16 as `auto` takes it from its cache, with all that it says."""
    said = []
    loop = Loop(Recipe(compute={"precision": precision}), say=said.append)

    def compute(batch):
        return nn.functional.mse_loss(model(batch.inputs).float(), batch.targets)

    source = as_source(data(), batch_size=64) if samples is None else as_source(samples)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    loop.prepare(model, optimizer, compute=compute, data=source, steps=30)
    loop.stepper.use(loop.stepper.switch.now.but(precision="bf16"))
    said.clear()
    return loop, compute, source, said


def train(loop, compute, source, steps, before=lambda number: None):
    for _ in loop.epochs(-(-steps // STEPS_OF_EPOCH)):
        for batch in loop.batches(source):
            before(loop.next_step)
            loop.step(compute, batch)


def precision(loop):
    return loop.stepper.switch.now.precision


@pytest.mark.slow
def test_a_function_without_noise_is_fitted_as_closely_as_in_fp32():
    """What it asked for stays in bf16, which gets no further than its 8 bits."""
    losses = {}
    for asked in ("auto", "bf16"):
        model = nn.Linear(16, 1)
        loop, compute, source, said = job(model, asked)
        train(loop, compute, source, 800)
        x, y = data()
        losses[asked] = nn.functional.mse_loss(model(x), y).item()
        assert precision(loop) == ("fp32" if asked == "auto" else "bf16")
        assert loop.resolved.compute.precision == precision(loop)
        assert len(said) == (asked == "auto")
    assert losses["auto"] < 1e-9 < 1e-7 < losses["bf16"]


def test_two_looks_in_turn_leave_it_and_one_does_not():
    loop, compute, source, said = job(model := Spoiled(), rate=0.0)

    def spoil(number):
        model.spoils = number == 64 or number >= 128

    train(loop, compute, source, 124, spoil)
    assert precision(loop) == "bf16"
    assert loop.rounding.next_step == 128
    train(loop, compute, source, 132, spoil)
    assert precision(loop) == "fp32"
    (line,) = said
    assert line.startswith("auto: steps run in fp32: from step 129 on bf16 changes gradients by")
    assert "more than rounding" in loop.resolved.choices["compute.precision"].reason
    assert line in loop.notes()


def test_ranks_leave_it_together():
    """What the other one has found counts, too."""

    class Two(World):
        def gather(self, value, what=""):
            return [value, 1.9 if isinstance(value, float) else value]

    loop, compute, _, _ = job(Spoiled())
    loop.world = Two(Place(0, 2, 0, 2))
    (batch,) = as_source(data(), batch_size=256).batches(0)
    for step in (64, 65):
        loop.progress.step_count = step - 1
        loop.rounding.around_step(Step(step, [batch], compute, loop.stepper.joint), lambda _: None)
    assert precision(loop) == "fp32"


def test_a_model_that_takes_whole_batches_only_is_looked_at_whole():
    model = Spoiled()
    loop, compute, source, _ = job(model)
    model.sizes, model.spoils = [64], True
    train(loop, compute, source, 68)
    assert precision(loop) == "fp32"


def test_batches_that_cannot_be_cut_are_looked_at_whole():
    class Bags(Spoiled):
        def forward(self, bags):
            ids, offsets = bags
            counts = nn.functional.embedding_bag(ids, torch.eye(16), offsets, mode="sum")
            return super().forward(counts)

    model = Bags()
    batch = (torch.arange(64) % 16, torch.arange(0, 64, 2)), torch.ones(32, 1)
    loop, compute, source, _ = job(model, samples=[batch] * STEPS_OF_EPOCH)
    model.spoils = True
    train(loop, compute, source, 68)
    assert precision(loop) == "fp32"


def test_a_look_leaves_no_trace():
    """With BatchNorm, dropout and a metric, and with a gradient that someone keeps."""
    x, y = torch.randn(256, 8), torch.randint(0, 3, (256,))

    def fit(*, looks):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(), nn.Linear(16, 3))
        trainer = flatout.Trainer(model, metrics=["accuracy"], say=lambda line: None)

        class Half(flatout.Callback):
            def on_fit_start(self, state):
                stepper, rounding = trainer.loop.stepper, trainer.loop.rounding
                stepper.use(stepper.switch.now.but(precision="bf16"))
                rounding.next_step = 5 if looks else sys.maxsize

        recipe = Recipe(process={"threads": 1})
        trainer = flatout.Trainer(
            model, metrics=["accuracy"], recipe=recipe, say=lambda line: None, lr=1e-3
        )
        history = trainer.fit((x, y), batch_size=32, epochs=3, callbacks=[Half()], progress=False)
        assert trainer.loop.rounding.next_step == (64 if looks else sys.maxsize)
        figures = [{k: v for k, v in e.items() if k != "seconds"} for e in history.epochs]
        return copy.deepcopy(model.state_dict()), figures, torch.get_rng_state()

    (ours, figures, randoms), (theirs, wanted, drawn) = fit(looks=True), fit(looks=False)
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    assert figures == wanted
    assert torch.equal(randoms, drawn)
