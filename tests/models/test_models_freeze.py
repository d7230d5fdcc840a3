"""Frozen parts of a torch model stay in evaluation, and let go of it again."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flatout
from flatout.errors import ModelError
from flatout.models import adapter_of


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5)),
        nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU()),
        nn.Flatten(),
        nn.Linear(4 * 4 * 4, 2),
    )


def frozen(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if not p.requires_grad}


def acting(model: nn.Module) -> set[str]:
    """Layers that act in training."""
    kinds = (nn.BatchNorm2d, nn.Dropout)
    return {n for n, m in model.named_modules() if isinstance(m, kinds) and m.training}


def test_the_front_stays_in_evaluation_where_train_is_called() -> None:
    model = flatout.freeze(small(), until="0")
    model.train()
    model[0].train()
    model[0][1].train(True)
    assert frozen(model) == {"0.0.weight", "0.0.bias", "0.1.weight", "0.1.bias"}
    assert acting(model) == {"1.1"}
    before = copy.deepcopy(model[0].state_dict())
    images = torch.randn(8, 3, 8, 8)
    model(images).sum().backward()
    for name, value in model[0].state_dict().items():
        assert torch.equal(value, before[name]), name
    assert torch.equal(model[0](images), model.eval()[0](images))


def test_a_frozen_model_gives_itself_back_and_its_state_dict_stays() -> None:
    model = small()
    keys = list(model.state_dict())
    assert flatout.freeze(flatout.freeze(model, until="1.1"), until="1.1") is model
    assert list(model.state_dict()) == keys
    assert flatout.unfreeze(model) is model


@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_is_frozen_alone(again) -> None:  # type: ignore[no-untyped-def]
    model = flatout.freeze(small(), until="0")
    copied = again(model)
    flatout.unfreeze(model, batch_norm=True)
    copied.train()
    assert acting(copied) == {"1.1"}
    assert acting(model) == {"0.1", "0.3", "1.1"}
    assert frozen(copied)
    assert not frozen(model)


def test_a_frozen_model_is_freed_without_the_garbage_collector() -> None:
    gc.disable()
    try:
        model = flatout.freeze(small())
        gone = weakref.ref(model[0])
        del model
        assert gone() is None
    finally:
        gc.enable()


def test_old_gradients_are_dropped_so_that_no_step_uses_them() -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    flatout.freeze(model, until="0")
    before = model[0][0].weight.clone()
    optimizer.step()
    assert torch.equal(model[0][0].weight, before)


class Residual(nn.Module):
    """The branch is registered behind the layer that it runs before."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.offset = nn.Parameter(torch.zeros(1))
        self.last = nn.Linear(4, 4)
        self.mix = nn.Linear(4, 4)
        self.first = nn.Linear(4, 4)
        self.branch = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.first(x * self.scale))
        x = self.mix(x + self.branch(x))
        return self.head(self.drop(self.last(x)) + self.offset)


def test_what_runs_before_is_read_off_the_graph() -> None:
    model = flatout.freeze(Residual(), until="mix")
    names = {name.partition(".")[0] for name in frozen(model)}
    assert names == {"scale", "first", "branch", "mix"}
    model.train()
    assert model.drop.training  # it also acts behind the last frozen layer


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1))
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([Residual() for _ in range(3)])
        self.head = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, skip: bool = False) -> torch.Tensor:
        x = self.stem(x) + self.token
        if not skip:
            x = torch.cat([block(F.dropout(x, 0.5, self.training)) for block in self.blocks])
        return self.head(x)


def test_without_a_graph_the_order_of_registration_tells() -> None:
    model = flatout.freeze(Branching(), until="blocks.1")
    names = {".".join(name.split(".")[:2]) for name in frozen(model)}
    assert {"token", "stem.weight", "blocks.0", "blocks.1"} <= names
    assert not names & {"blocks.2", "head.weight"}
    assert model.train().training


def test_names_below_wrappers_are_those_of_the_model() -> None:
    wrapped = nn.DataParallel(small())
    flatout.freeze(wrapped, until="0.1")
    wrapped.train()
    assert acting(wrapped) == {"module.0.3", "module.1.1"}


def test_layers_by_pattern() -> None:
    model = flatout.freeze(small(), layers=["0.[01]", "1"])
    model.train()
    assert acting(model) == {"0.3"}
    assert {name.partition(".")[0] for name in frozen(model)} == {"0", "1"}
    flatout.unfreeze(model, layers="1.*")
    assert acting(model) == {"0.3"}
    assert frozen(model) == {f"{n}.{k}" for n in ("0.0", "0.1", "1.1") for k in ("weight", "bias")}


def test_what_never_trained_does_not_begin_to() -> None:
    model = small()
    model[3].bias.requires_grad_(False)
    flatout.unfreeze(flatout.freeze(model), batch_norm=True)
    assert frozen(model) == {"3.bias"}
    assert acting(model.train()) == {"0.1", "0.3", "1.1"}


def test_an_unfrozen_part_follows_train_within_a_frozen_one() -> None:
    model = flatout.unfreeze(flatout.freeze(small()), layers="0.3")
    assert acting(model) == {"0.3"}  # as the model is in training, so is what is let go
    assert acting(model.eval()) == set()
    assert acting(model.train()) == {"0.3"}


def test_a_part_that_is_unfrozen_alone_does_as_the_model_around_it() -> None:
    model = small()
    flatout.freeze(model[0])
    model.train()
    flatout.unfreeze(model[0])
    assert acting(model) == {"0.3", "1.1"}
    flatout.freeze(model[0])
    model.eval()
    flatout.unfreeze(model[0])
    assert acting(model) == set()


@pytest.mark.parametrize("given", [{"until": "1.2x"}, {"layers": ["1.1", "1.2x"]}])
def test_an_unknown_name_lists_those_that_are_near(given) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ModelError, match=r"no layer '1.2x'; near it are: '1.2'"):
        flatout.freeze(small(), **given)
    with pytest.raises(ModelError, match="no layer"):
        flatout.unfreeze(small(), layers="features.*")


def test_the_job_of_a_frozen_model_is_told_by_its_parameters_only() -> None:
    model = small()
    by_hand = copy.deepcopy(model)
    for parameter in by_hand[0].parameters():
        parameter.requires_grad_(False)
    flatout.freeze(model, until="0")
    assert adapter_of(model).lines() == adapter_of(by_hand).lines()
