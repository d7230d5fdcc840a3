from queue import SimpleQueue

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flatout.data.batches.batch import Batch
from flatout.errors import NumbersError
from flatout.train.compute import ModelCompute
from flatout.train.guard import (
    _BAD_FORWARD,
    _BAD_SAMPLES,
    _NOTHING_FOUND,
    check_state,
    explain_bad_step,
)
from flatout.train.losses.losses import as_loss
from flatout.train.part import Step
from flatout.train.settings import Switch
from flatout.train.step import Stepper
from flatout.train.tables.table_reads import TableReads
from flatout.world import LostRank, Place, World

NAN, INF = float("nan"), float("inf")


def data(size=6, numbered=True):
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(size, 4, generator=draw), torch.arange(size) % 3
    return Batch(x, y, None, torch.arange(100, 100 + size) if numbered else None, size)


def network(*extra):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), *extra, nn.Linear(5, 3))


def explained(model, batch, loss="cross_entropy", **options):
    compute = ModelCompute(model, as_loss(loss), (), unweighted=True)
    options = {"step": 12, "learning_rate": 0.01, "held_back": True, **options}
    error = explain_bad_step(model, compute, batch, **options)
    assert isinstance(error, NumbersError)
    assert error.what == "the loss or a gradient is NaN or infinite"
    assert "clip_norm" in error.do
    return error.where.splitlines()


# -- the cause of a bad step -----------------------------------------------------------------------


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_bad_input_names_its_samples(value):
    batch = data()
    batch.inputs[1, 3] = batch.inputs[4, 0] = value
    assert explained(network(), batch) == [
        "step 12, learning rate 0.01",
        "  inputs: NaN or infinity in samples 101, 104",
        "  the weights are those before this step",
    ]


def test_inputs_in_structures_targets_and_weights_are_looked_at():
    batch = data()
    both = {"image": batch.inputs.clone(), "more": (batch.inputs.clone(), batch.targets)}
    both["more"][0][2] = NAN
    weight = torch.ones(6)
    weight[5] = INF
    target = torch.ones(6, 1)
    target[0] = NAN
    batch = Batch(both, target, weight, batch.indices, 6)
    assert explained(network(), batch)[1:4] == [
        "  inputs['more'][0]: NaN or infinity in sample 102",
        "  targets: NaN or infinity in sample 100",
        "  weight: NaN or infinity in sample 105",
    ]


def test_many_samples_and_samples_without_a_number():
    batch = data(9, numbered=False)
    batch.inputs[:8] = NAN
    assert explained(network(), batch)[1] == (
        "  inputs: NaN or infinity in rows 0, 1, 2, 3, 4, ... (8 in all) of the batch"
    )


class Log(nn.Module):
    """Of a negative number it is NaN."""

    def forward(self, x):
        return torch.log(x)


def test_a_module_that_makes_a_nan_is_named_with_its_samples():
    model = network(Log())
    batch = data()
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.fill_(1.0)
        model[0].weight[0, 0] = 1.0
    batch.inputs[:, 0] = 0.5
    batch.inputs[3, 0] = -2.0
    lines = explained(model, batch)
    assert lines[1] == "  inputs are finite; samples 100, 101, 102, 103, 104, ... (6 in all)"
    assert lines[2] == "  first bad value: output of module 1 (Log), sample 103"


def test_code_between_modules_that_makes_a_nan():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x):
            return self.second(torch.sqrt(self.first(x) - 100))

    assert explained(Net(), data())[2] == (
        "  first bad value: input of module second (Linear), made by the code around it, "
        "all samples"
    )


def test_code_after_the_last_module_that_makes_a_nan():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 3)

        def forward(self, x):
            return torch.log(self.first(x) - 100)

    assert "output of module model (Net)" in explained(Net(), data())[2]


def test_a_loss_that_makes_a_nan():
    def loss(output, target):
        return torch.log(output.sum() - 1e6)

    assert explained(network(), data(), loss)[2] == (
        "  first bad value: the loss itself, from finite model outputs"
    )


class SquareRoot(nn.Module):
    """Its gradient at 0 is infinite."""

    def forward(self, x):
        return torch.sqrt(x.abs())


def test_a_nan_that_arises_only_in_backward_names_a_weight():
    model = network(SquareRoot())
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.zero_()
    assert explained(model, data())[2] == "  forward is finite; first bad gradient: weight 0.bias"
    assert all(p.grad is None for p in model.parameters())


def test_a_step_that_is_fine_the_second_time():
    assert explained(network(), data())[2] == (
        "  running the step again gave finite gradients: random draws may decide"
    )


def test_a_step_that_fails_the_second_time():
    class Fails(nn.Module):
        def forward(self, x):
            raise KeyError("gone")

    assert explained(network(Fails()), data())[2] == "  running the step again failed: 'gone'"


def test_without_a_batch_or_with_damaged_weights():
    assert explained(network(), None) == [
        "step 12, learning rate 0.01",
        "  the weights are those before this step",
    ]
    lines = explained(network(Log()), data(), held_back=False)
    assert len(lines) == 3
    assert lines[-1] == "  the weights are damaged"


class OneOfTwo(World):
    """A rank whose neighbor has looked at its own part as well."""

    def __init__(self, rank, theirs):
        super().__init__(Place(rank, 2, rank, 2))
        self.theirs = theirs

    def gather(self, value, what=""):
        return [value, self.theirs] if self.rank == 0 else [self.theirs, value]


def test_of_several_ranks_the_one_with_the_bad_samples_tells():
    batch = data()
    batch.inputs[1, 3] = NAN
    lines = explained(network(), batch, world=OneOfTwo(1, _BAD_FORWARD))
    assert lines[:2] == [
        "rank 1 of 2, step 12, learning rate 0.01",
        "  inputs: NaN or infinity in sample 101",
    ]
    with pytest.raises(LostRank, match="step 12 is not finite by the part of rank 0"):
        explained(network(), data(), world=OneOfTwo(1, _BAD_SAMPLES))


def test_where_no_rank_finds_anything_the_first_tells():
    assert explained(network(), data(), world=OneOfTwo(0, _NOTHING_FOUND))
    with pytest.raises(LostRank):
        explained(network(), data(), world=OneOfTwo(1, _NOTHING_FOUND))


def test_running_again_leaves_no_trace():
    model = network(nn.BatchNorm1d(5), nn.Dropout(0.2), Log())
    before = {k: v.clone() for k, v in model.state_dict().items()}
    torch.manual_seed(3)
    random = torch.get_rng_state()
    lines = explained(model, data())
    assert "(Log)" in lines[2]
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks for m in model.modules())


def test_a_compiled_model_is_looked_into_without_compiling_it_again():
    compilations = []

    def backend(graph, _inputs):
        compilations.append(graph)
        return graph

    model = network(Log())
    model.compile(backend=backend)
    model(data().inputs)
    compiled, before = model._compiled_call_impl, len(compilations)
    assert "(Log)" in explained(model, data())[2]
    assert model._compiled_call_impl is compiled
    assert len(compilations) == before


def test_the_batch_is_run_in_as_many_pieces_as_it_needs():
    sizes = SimpleQueue()  # a check restores a list

    class Watch(nn.Module):
        def forward(self, x):
            sizes.put(len(x))
            return torch.where(x < -2, NAN, x)

    model, batch = network(Watch()), data()
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[0].bias.zero_()
    batch.inputs.fill_(1.0)
    batch.inputs[4] = -1.0
    assert explained(model, batch, pieces=3)[2] == (
        "  first bad value: output of module 1 (Watch), sample 104"
    )
    assert [sizes.get() for _ in range(sizes.qsize())] == [2, 2, 2]


# -- weights and buffers ---------------------------------------------------------------------------


def test_a_finite_model_passes():
    check_state(network(nn.BatchNorm1d(5)), "saving")
    check_state(nn.ReLU(), "saving")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_bad_weights_are_named(value, dtype):
    model = network().to(dtype)
    with torch.no_grad():
        model[1].weight[1, 2] = value
    with pytest.raises(NumbersError, match=r"NaN or infinity in weight 1.weight") as caught:
        check_state(model, "saving")
    assert caught.value.where == "found before saving"
    assert "checkpoint" in caught.value.do


def test_batch_norm_that_has_seen_a_nan_is_found_though_the_loss_is_finite():
    model, batch = network(nn.BatchNorm1d(5)), data()
    stepper = Stepper(
        Switch(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.device("cpu"))
    )
    compute = ModelCompute(model, as_loss("cross_entropy"), (), unweighted=True)
    bad = batch._replace(inputs=batch.inputs * NAN)
    stepper(Step(1, [bad], compute, stepper.joint))
    stepper.update.clear()
    assert torch.isfinite(stepper(Step(2, [batch], compute, stepper.joint)).loss)
    with pytest.raises(
        NumbersError, match=r"buffer 1.running_mean, buffer 1.running_var"
    ) as caught:
        check_state(model, "evaluation")
    assert caught.value.where == "found before evaluation"


def test_infinity_is_bad_in_statistics_and_right_in_a_mask():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.full((3, 3), -INF).triu(1))
            self.norm = nn.BatchNorm1d(2)

    model = Masked()
    check_state(model, "saving")
    model.norm.running_mean[0] = INF
    with pytest.raises(NumbersError, match=r"in buffer norm.running_mean\n"):
        check_state(model, "saving")
    model.norm.running_mean[0] = 0
    model.mask[0, 0] = NAN
    with pytest.raises(NumbersError, match="buffer mask"):
        check_state(model, "saving")


def test_large_float64_weights_are_fine():
    model = network().double()
    with torch.no_grad():
        model[0].weight.fill_(1e300)
    check_state(model, "saving")


def test_many_bad_tensors_are_counted():
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(4)])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(NAN)
    with pytest.raises(NumbersError) as caught:
        check_state(model, "saving")
    assert "and 3 more" in caught.value.what


def test_tensors_that_hold_no_numbers_are_passed_over():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.tensor(3))
            self.register_buffer("empty", torch.zeros(0))
            self.register_buffer("none", None)
            self.weight = nn.Parameter(torch.ones(2, dtype=torch.complex64))

    check_state(Odd(), "saving")


def test_samples_that_read_a_row_are_found_however_their_ids_lie():
    table, other = nn.Parameter(torch.zeros(9, 2)), nn.Parameter(torch.zeros(9, 2))
    with TableReads() as reads:
        F.embedding(torch.tensor([[1, 2], [3, 7], [4, 5]]), table)
        F.embedding(torch.tensor([[7], [7], [7]]), other)
        F.embedding_bag(torch.tensor([7, 1, 1, 2]), table, torch.tensor([0, 1, 1]))  # one is empty
        starts = torch.tensor([0, 1, 1, 2])
        F.embedding_bag(torch.tensor([1, 7]), table, starts, include_last_offset=True)
        F.embedding(torch.tensor([7, 7]), table)  # of no sample, such as all there are
    batch = Batch(torch.zeros(3), None, None, None, 3)
    assert reads.samples(table, [7], batch) == [0, 1, 2]
    assert reads.samples(table, [4, 5], batch) == [2]
    assert reads.samples(table, [3, 8], batch) == [1]
