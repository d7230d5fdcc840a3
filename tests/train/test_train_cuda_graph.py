"""What of CUDA graphs can be looked at without a GPU: tests/gpu has the rest."""

import pytest
import torch
from torch import nn
from train_jobs import data, quiet

import flatout
from flatout.optim import Update, fuse
from flatout.recipe import Compute, Recipe
from flatout.train.graphs.capture_graph import Unfit
from flatout.train.graphs.cuda_graph import CudaGraphs, check_containers
from flatout.train.graphs.cuda_graph_update import RecordedUpdate


def stepped(clip_norm=0.5):
    """A network and its update, after a step of torch's fused Adam."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    fuse(optimizer)
    update = Update(optimizer, clip_norm=clip_norm)
    gradients(model)
    update()
    return model, optimizer, update


def gradients(model):
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.3)


def state_of(model, optimizer):
    state = optimizer.state_dict()["state"]
    return [*model.parameters(), *(value for own in state.values() for value in own.values())]


def test_an_update_is_rehearsed_compared_and_put_back():
    model, optimizer, update = stepped()
    before = [tensor.detach().clone() for tensor in state_of(model, optimizer)]
    recorded = RecordedUpdate.of(update)
    with recorded.put_back():
        gradients(model)
        recorded.rehearse()
        gradients(model)
        recorded.make()
        assert recorded.share() == 0
        with torch.no_grad():
            model.weight += 1
        assert recorded.share() > 0.01
    assert all(map(torch.equal, state_of(model, optimizer), before))
    assert recorded.is_current()


def test_another_rate_or_state_is_another_update():
    _, optimizer, update = stepped()
    recorded = RecordedUpdate.of(update)
    optimizer.param_groups[0]["lr"] = 0.05
    assert not recorded.is_current()
    optimizer.param_groups[0]["lr"] = 0.1
    assert recorded.is_current()
    optimizer.load_state_dict(optimizer.state_dict())
    assert not recorded.is_current()


def test_an_update_that_waits_or_is_watched_is_not_recorded():
    model = nn.Linear(4, 2)
    plain = Update(torch.optim.Adam(model.parameters()))
    gradients(model)
    plain()
    assert RecordedUpdate.of(plain) is None
    _, optimizer, update = stepped()
    optimizer.register_step_post_hook(lambda *given: None)
    assert RecordedUpdate.of(update) is None


def test_tensors_in_lists_are_named_but_not_weights():
    model = nn.Sequential(nn.LSTM(4, 2), nn.BatchNorm1d(2))
    check_containers(model)
    model[1].kept = {"means": [torch.zeros(2)]}
    with pytest.raises(Unfit, match=r"^1 \(BatchNorm1d\) keeps a tensor in a dict$"):
        check_containers(model)


@pytest.mark.parametrize("asked", ["on", "auto"])
def test_without_a_gpu_steps_run_as_ever_and_who_asked_is_told(asked):
    recipe = Recipe(compute=Compute(cuda_graph=asked))
    trainer = flatout.Trainer(nn.Linear(12, 3), allow="exact", say=quiet, recipe=recipe)
    history = trainer.fit(data(), batch_size=32, epochs=1, progress=False)
    words = (
        "compute.cuda_graph: steps run without a graph: a CUDA graph needs a single rank on a CUDA "
        "device"
    )
    assert history.notes == ([words] if asked == "on" else [])


def test_the_first_shape_is_worth_a_graph_and_of_others_eight_that_come_again():
    graphs = CudaGraphs(None, quiet, is_asked=False)
    assert graphs._is_worth((32,))
    assert not graphs._is_worth((6,))  # a ragged last batch, until the next epoch
    assert graphs._is_worth((6,))
    lengths = [(length,) for length in range(100, 120)]
    assert not any(map(graphs._is_worth, lengths))
    assert sum(map(graphs._is_worth, lengths)) == 6
    assert sum(map(graphs._is_worth, lengths)) == 6
    assert graphs._is_worth((32,))
