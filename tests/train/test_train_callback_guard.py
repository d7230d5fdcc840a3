"""Changes that a callback leaves in the model or in torch do not reach later steps."""

import random

import numpy as np
import pytest
import torch
from torch import nn

import flatout
from flatout.errors import ModelError


class Net(nn.Module):
    """Records the modes of its layers and torch's flags in each step of training."""

    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 2)
        self.norm = nn.BatchNorm1d(16)
        self.seen = []

    def forward(self, x):
        if torch.is_grad_enabled():
            flags = torch.is_autocast_enabled("cpu"), torch.get_default_dtype()
            self.seen.append((self.training, self.drop.training, self.norm.training, *flags))
        return self.last(self.drop(self.norm(self.first(x))).relu())


def fitted(callback, epochs=3, **options):
    torch.manual_seed(0)
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    model, said = Net(), []
    trainer = flatout.Trainer(model, allow="exact", say=said.append, **options)
    history = trainer.fit(
        (x, (x[:, 0] > 0).long()), batch_size=32, epochs=epochs, verbose=0, callbacks=[callback]
    )
    return model, history, [line for line in said if type(callback).__name__ in line]


def on(event, act):
    """Return a callback, called Show, that calls a function in one event."""
    return type("Show", (flatout.Callback,), {event: lambda self, state: act(state)})()


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("event", ["on_fit_start", "on_epoch_start", "on_step", "on_epoch_end"])
def test_a_model_left_in_evaluation_mode_trains_on_in_training_mode(event):
    plain, _, _ = fitted(on("on_epoch_end", lambda state: None))
    model, history, said = fitted(on(event, lambda state: state.model.eval()))
    assert all(seen[:3] == (True, True, True) for seen in model.seen)
    assert torch.equal(weights(model), weights(plain))
    line = f"Show.{event} left the model in evaluation mode: put back into training mode for"
    assert [note for note in history.notes if line in note] == said
    assert len(said) == 1


def test_layers_that_a_callback_freezes_stay_so_and_are_reported():
    model, history, said = fitted(on("on_epoch_start", lambda state: state.model.norm.eval()))
    assert not any(seen[2] for seen in model.seen[-6:])
    assert all(seen[0] for seen in model.seen)
    line = "Show.on_epoch_start changed the mode of norm: training goes on with the new mode"
    assert said == [line]
    assert said[0] in history.notes
    frozen = fitted(on("on_epoch_start", lambda state: flatout.freeze(state.model.norm)))
    assert frozen[2] == []  # it is what was asked for


@pytest.mark.parametrize(
    ("act", "words", "is_as_before"),
    [
        (lambda s: torch.set_grad_enabled(False), "gradients", torch.is_grad_enabled),
        (
            lambda s: torch.autocast("cpu", torch.bfloat16).__enter__(),
            "autocast",
            lambda: not torch.is_autocast_enabled("cpu"),
        ),
        (
            lambda s: torch.set_default_dtype(torch.float64),
            "the default dtype",
            lambda: torch.get_default_dtype() is torch.float32,
        ),
        (
            lambda s: torch.use_deterministic_algorithms(True),
            "deterministic algorithms",
            lambda: not torch.are_deterministic_algorithms_enabled(),
        ),
        (
            lambda s: setattr(torch.backends.cudnn, "benchmark", True),
            "cuDNN's flags",
            lambda: not torch.backends.cudnn.benchmark,
        ),
    ],
)
@pytest.mark.parametrize("event", ["on_step", "on_epoch_end"])
def test_flags_of_torch_are_put_back(event, act, words, is_as_before):
    plain, _, _ = fitted(on("on_epoch_end", lambda state: None), epochs=2)
    try:
        model, history, said = fitted(on(event, act), epochs=2)
        assert is_as_before()
    finally:
        torch.set_grad_enabled(True)
        torch.set_autocast_enabled("cpu", False)
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = False
        torch.clear_autocast_cache()
    assert torch.equal(weights(model), weights(plain))
    assert said == [f"Show.{event} changed {words}: put back for the next step"]
    assert said[0] in history.notes


BF16 = flatout.Recipe(compute={"precision": "bf16"})


@pytest.mark.parametrize("event", ["on_fit_start", "on_step"])
def test_an_autocast_that_a_callback_leaves_open_keeps_no_weights_of_earlier_steps(event):
    plain, _, _ = fitted(on("on_epoch_end", lambda state: None), recipe=BF16)
    act = on(event, lambda state: torch.autocast("cpu", torch.bfloat16).__enter__())
    model, _, said = fitted(act, recipe=BF16)
    assert torch.equal(weights(model), weights(plain))
    assert said == [f"Show.{event} changed autocast: put back for the next step"]


@pytest.mark.parametrize("recipe", [None, BF16], ids=["fp32", "bf16"])
def test_a_fit_within_an_open_autocast_keeps_no_weights_of_earlier_steps(recipe):
    plain, _, _ = fitted(on("on_epoch_end", lambda state: None), recipe=BF16)
    with torch.autocast("cpu", torch.bfloat16):
        model, _, _ = fitted(on("on_epoch_end", lambda state: None), recipe=recipe)
    assert torch.equal(weights(model), weights(plain))


@pytest.mark.parametrize(
    ("draw", "kind"),
    [(torch.manual_seed, "torch"), (random.seed, "Python"), (np.random.seed, "numpy")],
)
@pytest.mark.parametrize("event", ["on_step", "on_epoch_end"])
def test_random_generators_that_a_callback_draws_from_are_reported(event, draw, kind):
    _, _, said = fitted(on(event, lambda state: draw(3)))
    words = f"Show.{event} draws from the random generator of {kind}: training draws other numbers"
    assert [line[: len(words)] for line in said] == [words]


def test_changes_after_the_last_step_are_kept():
    model, _, said = fitted(on("on_fit_end", lambda state: state.model.eval()))
    assert not model.training
    assert said == []


def test_a_callback_that_changes_nothing_says_nothing():
    def look(state):
        state.model.eval()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            state.model(torch.zeros(2, 8))
        state.model.train()

    assert fitted(on("on_epoch_end", look))[2] == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("on_step_end", "rename it to on_step,"),
        ("on_train_begin", "rename it to on_fit_start,"),
        ("on_epoch_begin", "rename it to on_epoch_start,"),
        ("on_evaluation_end", "rename it to on_evaluate_end,"),
        ("on_zzz", "rename it to one of on_fit_start, on_epoch_start, on_step,"),
    ],
)
def test_a_method_that_is_no_event_is_refused_with_the_nearest_one(name, words):
    with pytest.raises(ModelError) as caught:
        fitted(on(name, lambda state: None))
    assert f"Show.{name} would never be called" in str(caught.value)
    assert words in caught.value.do


def test_methods_that_resemble_no_event_are_accepted():
    callback = on("report", lambda state: None)
    callback.on_disk = 3
    assert fitted(callback)[2] == []


def test_an_object_that_is_no_callback_is_refused():
    with pytest.raises(ModelError, match=r"found dict\b"):
        fitted({})


def test_the_loss_of_the_latest_step_and_the_mean_of_the_epochs():
    seen = []

    class Losses(flatout.Callback):
        def on_step(self, state):
            seen.append((state.epoch, state.read_step_loss(), state.read_loss()))

    _, history, _ = fitted(Losses(), epochs=2)
    for epoch in (0, 1):
        own = [step for number, step, _ in seen if number == epoch]
        assert [mean for number, _, mean in seen if number == epoch] == pytest.approx(
            [sum(own[:n]) / n for n in range(1, len(own) + 1)]
        )
        assert history.epochs[epoch]["loss"] == pytest.approx(sum(own) / len(own))
    assert len({step for _, step, _ in seen}) == len(seen)
