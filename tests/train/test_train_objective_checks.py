"""Faults between model, optimizer and loss, which the Trainer and the Loop refuse."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from train_jobs import quiet

import flatout
from flatout.errors import ModelError

X, Y = torch.rand(64, 5, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 2


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2))


def by_loop(model, optimizer, loss, *, looks=True, say=quiet):
    """Train with the user's own loop, with or without a first look at the data."""
    loop = flatout.Loop(allow="exact", say=say)
    source = flatout.data.as_source((X, Y), batch_size=16)

    def compute(batch):
        return loss(model(batch.inputs), batch.targets)

    try:
        given = {"compute": compute, "data": source} if looks else {}
        loop.prepare(model, optimizer, **given)
        for _ in loop.epochs(1):
            for batch in loop.batches(source):
                loop.step(compute, batch)
    finally:
        loop.close()


def without_look(model, optimizer, loss, **options):
    by_loop(model, optimizer, loss, looks=False, **options)


def by_trainer(model, optimizer, loss, *, say=quiet):
    trainer = flatout.Trainer(model, optimizer=optimizer, loss=loss, allow="exact", say=say)
    trainer.fit((X, Y), batch_size=16, verbose=0)


WAYS = pytest.mark.parametrize("way", [by_loop, without_look, by_trainer])


def with_backward(output, target):
    loss = F.cross_entropy(output, target)
    loss.backward()
    return loss


def with_kept_graph(output, target):
    loss = F.cross_entropy(output, target)
    loss.backward(retain_graph=True)
    return loss


def linear_with_backward(output, target):
    loss = output.mean()
    loss.backward(retain_graph=True)
    return loss


@WAYS
@pytest.mark.parametrize("loss", [with_backward, with_kept_graph, linear_with_backward])
def test_a_loss_that_calls_backward_is_refused(way, loss):
    model = network()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ModelError, match=r"calls backward itself.*\n.*leave loss\.backward\(\)"):
        way(model, torch.optim.Adam(model.parameters()), loss)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())


@WAYS
def test_a_loss_without_a_graph_is_refused(way):
    model = network()
    with pytest.raises(ModelError, match="no graph that leads to the parameters"):
        way(
            model, torch.optim.Adam(model.parameters()), lambda o, t: F.cross_entropy(o, t).detach()
        )


@WAYS
def test_an_optimizer_of_another_model_is_refused(way):
    other = torch.optim.Adam(network().parameters())
    with pytest.raises(ModelError, match="no parameter of this model"):
        way(network(), other, F.cross_entropy)


@WAYS
def test_a_model_that_is_frozen_as_a_whole_is_refused(way):
    model = network().requires_grad_(False)
    with pytest.raises(ModelError, match=r"flatout\.unfreeze\(model\)"):
        way(model, torch.optim.Adam(model.parameters()), F.cross_entropy)
    flatout.unfreeze(model)  # follow the error's advice
    way(model, torch.optim.Adam(model.parameters()), F.cross_entropy)


@WAYS
def test_a_head_that_the_optimizer_misses_is_reported_once(way):
    model, said = network(), []
    way(model, torch.optim.Adam(model[0].parameters()), F.cross_entropy, say=said.append)
    words = "parameters require gradients, but the optimizer does not have them: 2.weight, 2.bias"
    assert sum(line.startswith(words) for line in said) == 1


def test_several_optimizers_may_share_the_parameters_out():
    model, said = network(), []
    both = [torch.optim.Adam(model[0].parameters()), torch.optim.SGD(model[2].parameters(), 0.1)]
    by_loop(model, both, F.cross_entropy, say=said.append)
    assert not any("the optimizer does not have them" in line for line in said)


@WAYS
def test_a_gradient_penalty_is_no_backward_of_the_users(way):
    model = network()

    def penalized(output, target):
        loss = F.cross_entropy(output, target)
        (gradient,) = torch.autograd.grad(loss, model[2].weight, create_graph=True)
        return loss + gradient.square().sum()

    way(model, torch.optim.Adam(model.parameters()), penalized)
