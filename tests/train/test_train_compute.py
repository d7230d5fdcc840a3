import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flatout.data.batches.batch import Batch
from flatout.errors import DataError
from flatout.train.compute import ModelCompute, call
from flatout.train.losses.losses import as_loss
from flatout.train.losses.metrics import as_metrics
from flatout.train.part import Step
from flatout.train.settings import Switch
from flatout.train.step import Stepper


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3))


def data(size=6, start=0):
    x = torch.randn(size, 4, generator=torch.Generator().manual_seed(start))
    return Batch(x, torch.arange(size) % 3, None, torch.arange(start, start + size), size)


class Add(nn.Module):
    def forward(self, a, b):
        return a + 2 * b


def test_inputs_are_handed_over_by_kind():
    a, b = torch.ones(2), torch.full((2,), 3.0)
    assert torch.equal(call(nn.Identity(), a), a)
    for inputs in ((a, b), [a, b], {"b": b, "a": a}):
        assert torch.equal(call(Add(), inputs), torch.full((2,), 7.0))


def test_forward_and_loss():
    model, batch = network(), data()
    compute = ModelCompute(model, as_loss("cross_entropy"), (), unweighted=True)
    assert torch.equal(compute(batch), F.cross_entropy(model(batch.inputs), batch.targets))


def test_metrics_see_each_output_once_and_without_its_graph():
    seen = []

    class Watch:
        def update(self, output, batch):
            seen.append((output.requires_grad, torch.is_grad_enabled(), batch.size))

    model = network()
    compute = ModelCompute(model, as_loss("cross_entropy"), [Watch()], unweighted=True)
    compute(data(6)).backward()
    compute(data(2)).backward()
    assert seen == [(False, False, 6), (False, False, 2)]


def test_metrics_over_a_step_in_pieces():
    (metric,) = as_metrics(["accuracy"]).values()
    model, batch = network(), data(7)
    with torch.no_grad():
        wanted = (model(batch.inputs).argmax(1) == batch.targets).float().mean()
    stepper = Stepper(
        Switch(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.device("cpu")),
        micro_batch=2,
    )
    compute = ModelCompute(model, as_loss("cross_entropy"), [metric], unweighted=True)
    stepper(Step(1, [batch], compute, stepper.joint))
    assert metric.compute() == pytest.approx(float(wanted))


@pytest.mark.parametrize("micro_batch", ["whole", "auto", 2])
@pytest.mark.parametrize("unweighted", [False, True])
def test_a_label_out_of_range_in_the_middle_of_training(micro_batch, unweighted):
    model = network()
    stepper = Stepper(
        Switch(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.device("cpu")),
        micro_batch=micro_batch,
    )
    compute = ModelCompute(model, as_loss("cross_entropy"), (), unweighted=unweighted)
    for step in range(3):
        stepper(Step(step, [data(6, step * 6)], compute, stepper.joint))
    before = model[0].weight.detach().clone()
    batch = data(6, 18)
    batch.targets[4] = 3
    with pytest.raises(DataError, match=r"label 3 is not in 0..2") as caught:
        stepper(Step(4, [batch], compute, stepper.joint))
    assert caught.value.where == "sample 22"
    assert isinstance(caught.value.__cause__, IndexError)
    assert torch.equal(model[0].weight, before)


def test_a_batch_of_another_kind_in_the_middle_of_training():
    compute = ModelCompute(network(), as_loss("cross_entropy"), (), unweighted=True)
    compute(data())
    with pytest.raises(DataError, match="the loss cross_entropy does not take") as caught:
        compute(data()._replace(targets=torch.zeros(6)))
    assert "targets float32 (6,)" in caught.value.where


def test_a_gpu_that_stopped_is_explained():
    """As torch says it: what lies on the GPU cannot be read any more."""

    def loss(output, target):
        raise RuntimeError("CUDA error: device-side assert triggered\nCompile with ...")

    compute = ModelCompute(network(), as_loss(loss), (), unweighted=True)
    with pytest.raises(DataError, match="most likely at a label") as caught:
        compute(data())
    assert "device='cpu'" in caught.value.do


def test_memory_that_runs_out_in_the_loss_is_not_the_datas_fault():
    def loss(output, target):
        raise torch.OutOfMemoryError("CUDA out of memory")

    compute = ModelCompute(network(), as_loss(loss), (), unweighted=True)
    with pytest.raises(torch.OutOfMemoryError):
        compute(data())


def test_errors_of_the_model_come_through():
    class Broken(nn.Module):
        def forward(self, x):
            raise ValueError("mine")

    compute = ModelCompute(Broken(), as_loss("mse"), (), unweighted=True)
    with pytest.raises(ValueError, match=r"^mine$"):
        compute(data())
