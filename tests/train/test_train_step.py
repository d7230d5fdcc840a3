"""One optimiser step: whole, in pieces, scaled, clipped, and after running out of memory."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flatout.data.batch import Batch, split
from flatout.errors import OutOfMemory
from flatout.train.losses import as_loss
from flatout.train.settings import Settings, Switch
from flatout.train.step import Stepper

DEVICE = torch.device("cpu")


def net(dtype=torch.float64, *middle: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), *middle, nn.Tanh(), nn.Linear(16, 4)).to(dtype)


def batch_of(size: int, dtype=torch.float64, ignore: bool = False, weights: bool = False) -> Batch:
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(size, 6, generator=generator, dtype=dtype)
    y = torch.randint(0, 4, (size,), generator=generator)
    if ignore:
        y[::3] = -100
    w = torch.rand(size, generator=generator, dtype=dtype) if weights else None
    return Batch(x, y, w, torch.arange(size), size)


def stepper_for(model, micro_batch="whole", lr=0.1, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    stepper = Stepper(Switch(model, optimizer, DEVICE), micro_batch=micro_batch, **options)
    stepper.use(Settings(threads=torch.get_num_threads()))
    return stepper


def compute_for(model, name="cross_entropy"):
    loss = as_loss(name)
    return lambda batch: loss(model(batch.inputs), batch)


def stepped(model, batches, micro_batch="whole", **options):
    stepper = stepper_for(model, micro_batch, **options)
    done = stepper(compute_for(model), batches, 1)
    return done, [p.detach().clone() for p in model.parameters()]


def close(a, b, tolerance=1e-12):
    return all(
        torch.allclose(x, y, rtol=tolerance, atol=tolerance) for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("kind", ["plain", "ignore", "weights"])
@pytest.mark.parametrize("micro_batch", [1, 3, 5, 64])
def test_micro_batches_give_the_gradient_of_the_whole_batch(kind, micro_batch):
    options = {"ignore": kind == "ignore", "weights": kind == "weights"}
    whole, expected = stepped(net(), (batch_of(16, **options),))
    pieces, found = stepped(net(), (batch_of(16, **options),), micro_batch)
    assert close(expected, found)
    assert float(pieces.loss) == pytest.approx(float(whole.loss), rel=1e-12)
    assert float(pieces.weight) == pytest.approx(float(whole.weight), rel=1e-12)


def test_accumulated_batches_give_the_gradient_of_all_of_them_together():
    both = batch_of(20, ignore=True)
    _, expected = stepped(net(), (both,))
    first, second = split(both, 2)
    _, found = stepped(net(), (first, second))
    assert close(expected, found)
    # A ragged end weighs what it holds, not half.
    ragged = (
        both._replace(inputs=both.inputs[:15], targets=both.targets[:15], size=15),
        both._replace(inputs=both.inputs[15:], targets=both.targets[15:], size=5),
    )
    _, found = stepped(net(), ragged)
    assert close(expected, found)


def test_all_targets_ignored_changes_nothing():
    batch = batch_of(6)._replace(targets=torch.full((6,), -100))
    model = net()
    before = [p.detach().clone() for p in model.parameters()]
    done, after = stepped(model, (batch,))
    assert close(before, after)
    assert float(done.weight) == 0


def test_a_step_is_the_handwritten_one_bit_for_bit():
    batch = batch_of(16)
    ours, theirs = net(), net()
    stepped(ours, (batch,))
    F.cross_entropy(theirs(batch.inputs), batch.targets).backward()
    torch.optim.SGD(theirs.parameters(), lr=0.1).step()
    assert all(
        torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)
    )


def test_clipping_limits_the_whole_gradient_of_a_split_batch():
    ours, theirs = net(), net()
    batch = batch_of(16)
    stepped(ours, (batch,), 4, clip_norm=0.01)
    F.cross_entropy(theirs(batch.inputs), batch.targets).backward()
    torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.01)
    torch.optim.SGD(theirs.parameters(), lr=0.1).step()
    assert close(list(ours.parameters()), list(theirs.parameters()))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_trains(precision):
    model = net(torch.float32)
    stepper = stepper_for(model, lr=0.5)
    stepper.use(Settings(precision=precision, threads=torch.get_num_threads()))
    batch, compute = batch_of(64, torch.float32), compute_for(model)
    losses = [float(stepper(compute, (batch,), n).loss) for n in range(60)]
    assert losses[-1] < 0.8 * losses[0]
    assert (stepper.scaler is not None) == (precision == "fp16")
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_fp16_skips_a_step_that_overflows_and_lowers_the_scale():
    model = net(torch.float32)
    stepper = stepper_for(model)
    stepper.use(Settings(precision="fp16", threads=torch.get_num_threads()))
    before = [p.detach().clone() for p in model.parameters()]
    batch = batch_of(8, torch.float32)

    def huge(piece):
        total, weight = compute_for(model)(piece)
        return total * 1e30, weight

    scale = stepper.scaler.get_scale()
    stepper(huge, (batch,), 1)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert stepper.scaler.get_scale() < scale


class _Narrow(nn.Module):
    """Runs out of memory above `limit` samples, as a device would."""

    def __init__(self, limit: int, error: Exception) -> None:
        super().__init__()
        self.limit, self.error, self.seen = limit, error, []

    def forward(self, x):
        self.seen.append(len(x))
        if len(x) > self.limit:
            raise self.error
        return x


ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
    MemoryError(),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_out_of_memory_splits_the_batch_and_gives_the_same_gradient(error):
    _, expected = stepped(net(), (batch_of(16),))
    narrow = _Narrow(5, error)
    model = net(torch.float64, narrow)
    stepper = stepper_for(model, "auto")
    done = stepper(compute_for(model), (batch_of(16),), 7)
    found = [p.detach() for p in model.parameters()]
    assert close(expected, found)
    assert stepper.pieces == 4
    assert any("4 micro-batches" in note for note in stepper.notes)
    assert done.forward > 0
    assert done.backward > 0
    # The next step begins with what fits.
    narrow.seen.clear()
    stepper(compute_for(model), (batch_of(16),), 8)
    assert max(narrow.seen) <= 5


def test_a_single_sample_that_does_not_fit_is_an_error():
    model = net(torch.float64, _Narrow(0, MemoryError()))
    stepper = stepper_for(model, "auto")
    with pytest.raises(OutOfMemory, match="single sample"):
        stepper(compute_for(model), (batch_of(4),), 3)


def test_batchnorm_is_not_split_unasked():
    model = net(torch.float64, nn.BatchNorm1d(16), _Narrow(5, MemoryError()))
    stepper = stepper_for(model, "auto")
    with pytest.raises(OutOfMemory, match="BatchNorm") as caught:
        stepper(compute_for(model), (batch_of(16),), 3)
    assert "micro_batch=8" in str(caught.value)


def test_other_errors_are_not_taken_for_memory():
    model = net(torch.float64, _Narrow(5, RuntimeError("shapes do not match")))
    stepper = stepper_for(model, "auto")
    with pytest.raises(RuntimeError, match="shapes do not match"):
        stepper(compute_for(model), (batch_of(16),), 1)


def test_out_of_memory_in_the_optimiser_is_not_taken_again():
    model = net()
    stepper = stepper_for(model, "auto")

    def fail(*_args, **_kwargs):
        raise MemoryError

    stepper.switch.optimizer.step = fail
    with pytest.raises(MemoryError):
        stepper(compute_for(model), (batch_of(16),), 1)
    assert stepper.pieces == 1


def test_settings_are_switched_in_place_and_back():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 4)
    )
    keys, parameters = list(model.state_dict()), list(model.parameters())
    values = copy.deepcopy(model.state_dict())
    stepper = Stepper(Switch(model, torch.optim.Adam(parameters), DEVICE))
    plain = stepper.switch.now
    stepper.use(plain.but(memory_format="channels_last", rewrites=True, fused_optimizer=True))
    assert "forward" in model.__dict__  # the rewritten one
    assert stepper.switch.optimizer.param_groups[0]["fused"]
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    stepper.use(plain)
    assert "forward" not in model.__dict__
    assert stepper.switch.optimizer.param_groups[0]["fused"] is None
    assert all(torch.equal(values[k], v) for k, v in model.state_dict().items())
