"""One rank's part of a step: memory that runs out, and time that goes by in waiting for others."""

import time
from time import perf_counter_ns as clock

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from flatout.data.batches.batch import Batch
from flatout.errors import OutOfMemory
from flatout.strategies import Ddp
from flatout.strategies.reductions.collectives import AllReduce
from flatout.train.compute import ModelCompute
from flatout.train.losses.losses import as_loss
from flatout.train.part import Step
from flatout.train.settings import Switch
from flatout.train.step import Stepper
from flatout.world import Place, World


class Sum:
    """Of ranks that are late."""

    def __init__(self, late_s):
        self.late_s = late_s

    def wait(self):
        time.sleep(self.late_s)


class NextToNobody(World):
    """Rank 1 of 2, where rank 0 adds nothing."""

    def __init__(self, late_s=0.0):
        super().__init__(Place(1, 2, 1, 2))
        self.late_s, self.names = late_s, []

    def sum(self, tensor, what="", *, later=False):
        begun = self.begun(Sum(self.late_s), what)
        return begun if later else self.until(begun)

    def begun(self, work, what):
        self.names.append(what)
        return super().begun(work, what)


class Named(AllReduce):
    """Adds up as the world does."""

    def __init__(self, world):
        super().__init__(None)
        self.world = world

    def begin(self, flat):
        return Sum(self.world.late_s)


class Limited(nn.Module):
    """Has memory for `most` samples, in the forward or in the backward."""

    def __init__(self, most, where):
        super().__init__()
        self.most, self.where = most, where
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += len(x)
        if len(x) > self.most:
            if self.where == "forward":
                self.fail()
            x.register_hook(self.fail)
        return x

    def fail(self, *_):
        raise torch.OutOfMemoryError("CUDA out of memory")


def network(*extra):
    torch.manual_seed(0)
    # More than the first bucket holds, so that one is sent before backward reaches `extra`.
    return nn.Sequential(nn.Linear(6, 800), *extra, nn.Linear(800, 400), nn.Linear(400, 4))


def data(size=10):
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(size, 6, generator=draw), torch.randint(0, 4, (size,), generator=draw)
    return Batch(x, y, None, torch.arange(size), size)


def step(model, world, given, steps=1, **options):
    stepper = Stepper(Switch(model, torch.optim.SGD(model.parameters(), lr=1.0), CPU), **options)
    stepper.meet(world)
    strategy = Ddp(world, model, Named(world).started(CPU))
    stepper.train_with(world, given.size, strategy)
    compute = ModelCompute(model, as_loss("cross_entropy"), (), unweighted=False)
    try:
        return [
            stepper(Step(number, [given], compute, stepper.joint)) for number in range(7, 7 + steps)
        ][-1], stepper
    finally:
        stepper.close()


CPU = torch.device("cpu")


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_part_that_does_not_fit_is_split_and_each_bucket_sent_once(where):
    given, world = data(), NextToNobody()
    model, plain = network(limited := Limited(3, where)), network()
    wanted = torch.autograd.grad(
        cross_entropy(plain(given.inputs), given.targets), list(plain.parameters())
    )
    before = [p.detach().clone() for p in model.parameters()]
    done, stepper = step(model, world, given, micro_batch="auto")
    for was, now, gradient in zip(before, model.parameters(), wanted, strict=True):
        torch.testing.assert_close(was - now, gradient, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(done.loss, cross_entropy(plain(given.inputs), given.targets))
    assert world.names == [
        "sum of gradients, bucket 1 of 2",
        "sum of gradients, bucket 2 of 2",
    ]
    assert stepper.notes == [
        "step 7: memory ran out on rank 1; its part now runs in 2 micro-batches",
        "step 7: memory ran out on rank 1; its part now runs in 4 micro-batches",
    ]
    # Of attempts that failed the buffers keep nothing.
    assert limited.seen == given.size


def test_the_next_step_sends_all_buckets_again():
    world = NextToNobody()
    step(network(Limited(5, "backward")), world, data(), steps=3, micro_batch="auto")
    assert world.names == world.names[:2] * 3


@pytest.mark.parametrize("micro_batch", ["auto", 3])
def test_gradients_that_another_loss_left_are_not_sent(micro_batch):
    given, found = data(), []
    for leaves in (False, True):
        model = network()
        if leaves:
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
        step(model, NextToNobody(), given, micro_batch=micro_batch)
        found.append([p.detach() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_batch_norm_is_not_split_unasked_and_the_rank_is_named():
    model = network(nn.BatchNorm1d(800), Limited(3, "forward"))
    with pytest.raises(OutOfMemory, match="memory ran out on rank 1, and BatchNorm") as caught:
        step(model, NextToNobody(), data(), micro_batch="auto")
    assert "micro_batch=5" in caught.value.do


def test_pieces_that_were_asked_for_and_do_not_fit():
    with pytest.raises(OutOfMemory, match="memory ran out on rank 1") as caught:
        step(network(Limited(3, "forward")), NextToNobody(), data(), micro_batch=5)
    assert "step 7, batch of 10, micro_batch=5" in caught.value.where


def test_waiting_for_others_is_sync_also_in_the_forward_of_batch_norm():
    world = NextToNobody(late_s=0.02)
    start = clock()
    done, _ = step(network(nn.BatchNorm1d(800)), world, data())
    took = clock() - start
    # Two buckets; BatchNorm's forward and backward.
    slept = 4 * 20_000_000
    assert done.sync >= slept
    assert done.forward + done.backward + done.optimizer + done.sync <= took
    assert world.collectives.waited == done.sync
    assert (world.collectives.step, world.collectives.begun, world.collectives.waiting) == (
        7,
        4,
        None,
    )
