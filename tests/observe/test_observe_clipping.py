"""Gradients that are clipped while a scaler has them multiplied."""

from threading import get_ident

import pytest
import torch
from torch import nn

from flatout.observe.clipping import Clipping
from flatout.observe.optimizers import SeenOptimizer
from flatout.observe.watch import Watch


@pytest.fixture
def clipped():
    """Steps a model once under watch, and gives what was seen of the clipping."""
    made = []

    def step(clip, *, unscaled=(), enabled=True, frozen=False):
        watch = Watch()
        watch.lanes.thread, watch.lanes.steps = get_ident(), 1
        made.append(Clipping(torch, watch))
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        model[0].requires_grad_(not frozen)
        trained = [one for one in model.parameters() if one.requires_grad]
        other = nn.Linear(1, 1)
        optimizers = [torch.optim.SGD(of, 0.1) for of in (trained, other.parameters())]
        watch.optimizers += [SeenOptimizer(one, None) for one in optimizers]
        scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        scaler.scale(model(torch.ones(4, 2)).sum()).backward()
        for one in unscaled:
            scaler.unscale_(optimizers[one])
        watch.lanes.backwards = 1
        clip([*model.parameters(), *other.parameters()])
        return [call.detail for call in watch.calls.all() if call.kind == "clip"]

    yield step
    for clipping in made:
        clipping._end()


STYLES = {
    "positional": lambda of: nn.utils.clip_grad_norm_(of, 1.0),
    "named": lambda of: nn.utils.clip_grad_norm_(of, max_norm=1.0, norm_type=2),
    "all_named": lambda of: nn.utils.clip_grad_norm_(parameters=iter(of), max_norm=1.0),
    "value": lambda of: nn.utils.clip_grad_value_(of, clip_value=1.0),
}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("frozen", [False, True])
def test_what_was_not_divided_is_seen_in_any_style(clipped, style, frozen):
    (detail,) = clipped(STYLES[style], frozen=frozen)
    assert (detail["scale"], detail["limit"]) == (65536.0, 1.0)
    assert not detail["is_late"]
    # The other optimizer has no gradients that it could divide.
    (detail,) = clipped(STYLES[style], frozen=frozen, unscaled=[0])
    assert (detail["scale"], detail["is_scaler_off"]) == (1.0, False)


def test_a_scaler_that_is_off_is_told_apart(clipped):
    (detail,) = clipped(STYLES["named"], enabled=False)
    assert (detail["scale"], detail["is_scaler_off"]) == (1.0, True)
    (detail,) = clipped(STYLES["named"], enabled=False, unscaled=[0])
    assert not detail["is_scaler_off"]


def test_what_is_missing_is_said_by_the_function_itself(clipped):
    with pytest.raises(TypeError, match="max_norm"):
        clipped(lambda of: nn.utils.clip_grad_norm_(of))
