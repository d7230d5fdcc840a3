import pytest
import torch
import torch.nn.functional as F
from torch import nn
from train_jobs import figures, quiet

import flatout
from flatout.data.batches.batch import Batch
from flatout.errors import DataError, ModelError
from flatout.train.compute import ModelCompute
from flatout.train.losses.losses import as_loss

X = torch.randn(66, 4, generator=torch.Generator().manual_seed(0))
Y = X.sum(1)


def job(loss, last=1, **options):
    torch.manual_seed(0)
    return flatout.Trainer(nn.Linear(4, last), loss=loss, say=quiet, **options)


def by_hand(output, target):
    return ((output - target) ** 2).mean()


def through_other_operators(output, target):
    return torch.where(target.float() > 0, output[:, :1].tanh(), -output).mean()


def within(output, target):
    return F.smooth_l1_loss(output.exp(), target)


@pytest.mark.parametrize(
    "loss",
    [
        nn.MSELoss(),
        nn.L1Loss(),
        nn.SmoothL1Loss(),
        nn.HuberLoss(),
        nn.PoissonNLLLoss(),
        F.mse_loss,
        F.l1_loss,
        by_hand,
        through_other_operators,
        within,
    ],
    ids=lambda loss: getattr(loss, "__name__", type(loss).__name__),
)
@pytest.mark.parametrize("wide", ["output", "target"])
def test_a_loss_that_would_broadcast_is_an_error_before_the_first_step(loss, wide):
    if wide == "target" and loss is through_other_operators:
        pytest.skip("it needs a column")
    model = nn.Sequential(nn.Linear(4, 1), *([] if wide == "output" else [nn.Flatten(0)]))
    y = Y if wide == "output" else Y[:, None]
    before = [p.clone() for p in model.parameters()]
    trainer = flatout.Trainer(model, loss=loss, say=quiet)
    for rows, run in (
        (33, lambda: trainer.fit((X, y), batch_size=33, progress=False)),
        (66, lambda: trainer.evaluate(X, y)),
    ):
        ours, theirs = ((rows, 1), (rows,)) if wide == "output" else ((rows,), (rows, 1))
        with pytest.raises(ModelError, match="would compare each output with every target") as e:
            run()
        assert f"output {ours} and target {theirs}" in e.value.what
        assert e.value.where == f"the model returns {ours}, the targets are {theirs}"
        assert "squeeze" in e.value.do
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_loss_that_torch_refuses_says_what_to_do():
    with pytest.raises(DataError, match="BCEWithLogitsLoss does not take this batch") as caught:
        job(nn.BCEWithLogitsLoss()).fit((X, (Y > 0).float()), progress=False)
    assert "squeeze(1)" in caught.value.do


def test_as_many_samples_as_classes():
    """(n, k) against (n,) fails for all n but k, where it learns something else."""
    with pytest.raises(ModelError, match=r"output \(11, 11\) and target \(11,\)"):
        job(by_hand, last=11).fit((X, Y), batch_size=11, progress=False)


def test_one_value_against_several():
    with pytest.raises(ModelError, match=r"output \(32, 1\) and target \(32, 4\)"):
        job(nn.MSELoss()).fit((X, X), progress=False)


def test_rows_that_only_fill_a_batch_up_are_no_way_out():
    batch = Batch(X, Y, None, None, 66, padding=3)
    compute = ModelCompute(nn.Linear(4, 1), as_loss(by_hand), (), unweighted=False)
    with pytest.raises(ModelError, match=r"output \(63, 1\) and target \(63,\)"):
        compute(batch)


def test_a_metric_of_ones_own():
    with pytest.raises(ModelError, match="the metric l1_loss would compare each output"):
        job("mse", metrics=[F.l1_loss]).fit((X, Y), progress=False)


def ranking(output, target):
    """All pairs, on purpose."""
    better = target[:, None] > target
    return F.softplus((output - output.T)[better]).mean() + (output.unsqueeze(2) - target).mean()


def squeezed(output, target):
    return F.mse_loss(output.squeeze(1), target)


def weighed(output, target):
    return ((output[:, 0] - target) ** 2 * target.abs().mean()).mean(), 1.0


@pytest.mark.parametrize("loss", [ranking, squeezed, weighed])
def test_what_is_meant_stays_as_it_is(loss):
    trainer = job(loss, allow="exact", metrics=[squeezed])
    trainer.fit((X, Y), progress=False)
    plain = nn.Linear(4, 1)
    plain.load_state_dict(trainer.model.state_dict())
    value = loss(plain(X), Y)
    value = value[0] if isinstance(value, tuple) else value
    assert trainer.evaluate(X, Y)["loss"] == float(value.detach())


@pytest.mark.slow
def test_a_compiled_loss_is_looked_into_and_runs_compiled_afterwards():
    compiled = torch.compile(by_hand, backend="aot_eager")
    with pytest.raises(ModelError, match="would compare each output"):
        job(compiled).fit((X, Y), progress=False)
    torch._dynamo.reset()
    ours = job(compiled, allow="exact").fit((X, Y[:, None]), progress=False)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    plain = job(by_hand, allow="exact").fit((X, Y[:, None]), progress=False)
    assert figures(ours)[0]["loss"] == pytest.approx(figures(plain)[0]["loss"])


def of_loop(compute_loss, model=None):
    """A Loop whose own `compute` is looked at before the first step."""
    model = model or nn.Linear(3, 1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    data = flatout.data.as_source((torch.randn(16, 3), torch.randn(16)), batch_size=8)
    loop = flatout.Loop(say=print)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loop.prepare(
        model, optimizer, compute=lambda batch: compute_loss(model(batch.inputs), batch), data=data
    )
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    "loss", [nn.MSELoss(), nn.L1Loss(), nn.HuberLoss(), torch.nn.functional.smooth_l1_loss]
)
def test_a_loss_within_a_loops_own_compute(loss):
    with pytest.raises(ModelError, match=r"(?s)every target: \(8, 1\) and \(8,\).*\.squeeze\(1\)"):
        of_loop(lambda output, batch: loss(output, batch.targets))
    of_loop(lambda output, batch: loss(output.squeeze(1), batch.targets))
    of_loop(lambda output, batch: loss(output, batch.targets.mean()))  # one for all is meant


def test_tensors_of_other_rows_are_the_users_own_affair():
    of_loop(lambda output, batch: nn.functional.mse_loss(output[:4], batch.targets[:4]))


def minus(output, batch):
    return ((output - batch.targets) ** 2).mean()


def unsqueezed(output, batch):
    """What a module returns is an output, whatever it is made of."""
    return (nn.Unflatten(0, (-1, 1))(output[:, 0]) - batch.targets).abs().mean()


OWN = [minus, unsqueezed]


@pytest.mark.parametrize("loss", OWN)
def test_operators_within_a_loops_own_compute(loss):
    with pytest.raises(ModelError, match=r"output \(8, 1\) and target \(8,\)"):
        of_loop(loss)


@pytest.mark.parametrize("loss", [ranking, squeezed, weighed])
def test_what_a_loops_compute_means_stays_as_it_is(loss):
    of_loop(lambda output, batch: loss(output, batch.targets))


BATCH = Batch(X, Y, None, None, 66)


def stepped(loss, model=None, batch=BATCH):
    """Whether two steps of a Loop move weights; it knows neither data nor compute before."""
    torch.manual_seed(0)
    model = model or nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loop = flatout.Loop(say=quiet)
    loop.prepare(model, optimizer)
    before = [p.clone() for p in model.parameters()]
    for _ in range(2):
        loop.step(lambda batch: loss(model(X), batch), batch)
    loop.close()
    return any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("loss", OWN)
def test_the_first_step_of_a_loop_looks_before_the_update(loss):
    model = nn.Linear(4, 1)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(ModelError, match=r"output \(66, 1\) and target \(66,\)"):
        stepped(loss, model)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert stepped(lambda output, batch: loss(output, batch._replace(targets=Y[:, None])))


def test_targets_among_the_inputs():
    batch = Batch((X, Y), None, None, None, 66)
    with pytest.raises(ModelError, match=r"output \(66, 1\) and target \(66,\)"):
        stepped(lambda output, batch: (output - batch.inputs[1]).abs().mean(), batch=batch)


def test_later_steps_are_not_inspected():
    seen = []

    def loss(output, batch):
        seen.append(len(torch.overrides._get_current_function_mode_stack()))
        return minus(output[:, 0], batch)

    stepped(loss)
    assert seen == [1, 0]


def test_a_first_step_is_inspected_until_it_calls_compiled_code():
    """Find a fault before the first call of compiled code, and pass over the code after it."""
    seen = []

    def backend(graph, inputs):
        seen.append(len(torch.overrides._get_current_function_mode_stack()))
        return graph.forward

    compiled = torch.compile(lambda output: output * 2, backend=backend)
    assert stepped(lambda output, batch: minus(compiled(output)[:, 0], batch))
    assert seen == [0]
    with pytest.raises(ModelError, match="every target"):
        stepped(minus)
    with pytest.raises(ModelError, match="every target"):
        stepped(lambda output, batch: minus(output, batch) + compiled(output).mean())
