"""evaluate: each sample once, whatever the batches; nothing of the model changes."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from train_jobs import CLASSES, SAMPLES, data, images, network, trainer

import flatout
from flatout.errors import DataError, NumbersError
from flatout.recipe import Compute, Recipe
from flatout.train import objective

pytestmark = pytest.mark.usefixtures("one_thread")


def test_loss_and_metrics_are_those_of_all_samples():
    x, y = data()
    model = network()
    found = trainer(model, metrics=["accuracy"]).evaluate((x, y), batch_size=7)
    model.eval()
    with torch.no_grad():
        output = model(x)
    assert found["loss"] == pytest.approx(float(F.cross_entropy(output, y)), rel=1e-6)
    assert found["accuracy"] == pytest.approx(float((output.argmax(1) == y).float().mean()))
    assert list(found) == ["loss", "accuracy"]


@pytest.mark.parametrize("loss", ["cross_entropy", "nll", nn.CrossEntropyLoss(), "pixels"])
def test_where_no_target_is_ignored_the_loss_has_the_same_bits(loss, monkeypatch):
    """The mean of each batch is then what its sum is, divided by how many count."""
    x, y = data()
    model = nn.Sequential(network(), nn.LogSoftmax(1))
    if loss == "pixels":
        x, y = torch.rand(48, 1, 6, 6), torch.randint(0, CLASSES, (48, 6, 6))
        model, loss = nn.Conv2d(1, CLASSES, 3, padding=1), "cross_entropy"
    counted = trainer(model, loss=loss).evaluate((x, y), batch_size=7)
    monkeypatch.setattr(objective, "_counts_all", lambda loss, source: False)
    assert trainer(model, loss=loss).evaluate((x, y), batch_size=7) == counted


def test_a_label_that_is_no_class_is_named():
    x, y = data()
    y[SAMPLES - 2] = CLASSES
    with pytest.raises(DataError, match=rf"{CLASSES} is not in 0\.\.{CLASSES - 1}") as caught:
        trainer(network()).evaluate((x, y), batch_size=7)
    assert f"sample {SAMPLES - 2}" in str(caught.value)


def test_a_nan_in_one_sample_is_named():
    x, y = data()
    x[3, 1] = float("nan")
    said = []
    alone = flatout.Trainer(network(), loss="cross_entropy", say=said.append)
    assert math.isnan(alone.evaluate((x, y), batch_size=7)["loss"])
    (line,) = [line for line in said if "not finite" in line]
    assert line.startswith("loss of this evaluation is not finite: in the data")
    assert "inputs: NaN or infinity in sample 3" in line


@settings(max_examples=15)
@given(st.integers(1, SAMPLES + 20), st.lists(st.booleans(), min_size=SAMPLES, max_size=SAMPLES))
def test_the_batch_size_does_not_matter_with_ignored_targets(batch_size, ignored):
    x, y = data()
    ignored[0] = False
    y = torch.where(torch.tensor(ignored), -100, y)
    model = network()
    found = trainer(model).evaluate(x, y, batch_size=batch_size)["loss"]
    model.eval()
    with torch.no_grad():
        assert found == pytest.approx(float(F.cross_entropy(model(x), y)), rel=1e-5)


@pytest.mark.parametrize("batch_size", [1, 7, 64, SAMPLES, 1000])
def test_the_batch_size_does_not_matter_for_any_loss_and_metric(batch_size):
    torchmetrics = pytest.importorskip("torchmetrics.classification")
    x, y = data()
    weight = torch.linspace(0, 2, SAMPLES)

    def mine(output, target):
        each = F.cross_entropy(output, target, reduction="none") * (1 + target)
        return each.sum(), (1 + target).sum()

    model = network()
    metrics = {"f1": torchmetrics.MulticlassF1Score(CLASSES), "accuracy": "accuracy"}
    of_mine = trainer(model, loss=mine, metrics=metrics)
    found = of_mine.evaluate((x, y), batch_size=batch_size)
    assert found == pytest.approx(of_mine.evaluate((x, y), batch_size=SAMPLES), rel=1e-5)
    weighted = trainer(model)
    loss = weighted.evaluate((x, y, weight), batch_size=batch_size)["loss"]
    model.eval()
    with torch.no_grad():
        each = F.cross_entropy(model(x), y, reduction="none")
    assert loss == pytest.approx(float((each * weight).sum() / weight.sum()), rel=1e-5)


@pytest.mark.parametrize(
    "form",
    [
        lambda x, y: DataLoader(TensorDataset(x, y), batch_size=40),
        lambda x, y: [(x[:50], y[:50]), (x[50:], y[50:])],
        lambda x, y: lambda: iter([(x[:50], y[:50]), (x[50:], y[50:])]),
        lambda x, y: TensorDataset(x, y),
        lambda x, y: (x.numpy(), y.numpy()),
        lambda x, y: flatout.data.Arrays(x, y),
    ],
)
def test_every_kind_of_input(form):
    x, y = data()
    job = trainer(network(), metrics=["accuracy"])
    assert job.evaluate(form(x, y)) == pytest.approx(job.evaluate(x, y), rel=1e-5)


def test_every_sample_counts_once():
    seen = []

    class Watching(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(1, CLASSES)

        def forward(self, x):
            seen.extend(x.flatten().tolist())
            return self.inner(x)

    x = torch.arange(101.0)[:, None]
    trainer(Watching()).evaluate(x, torch.zeros(101, dtype=torch.long), batch_size=10)
    assert seen == list(range(101))


def test_modes_buffers_gradients_and_random_states_stay():
    x, y = data()
    model = network()
    model[1].eval()
    job = trainer(model)
    job.fit((x, y), progress=False)
    F.cross_entropy(model(x), y).backward()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    gradients = [p.grad.clone() for p in model.parameters()]
    drawn = torch.get_rng_state()
    outputs = []
    handle = model[4].register_forward_hook(lambda m, i, output: outputs.append(output))
    job.evaluate(x, y)
    handle.remove()
    assert not outputs[0].requires_grad
    assert [m.training for m in model.modules()] == [True, True, False, True, True, True]
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    assert torch.equal(torch.get_rng_state(), drawn)


def test_modes_stay_after_an_error_too():
    model = network()
    model[3].eval()
    handle = model[4].register_forward_pre_hook(lambda m, i: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer(model).evaluate(*data())
    handle.remove()
    assert [m.training for m in model] == [True, True, True, False, True]


class Positions(nn.Module):
    """A model that keeps a table it makes on its first forward, as rotary embeddings do."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(12, CLASSES)
        self.table = None

    def forward(self, x):
        if self.table is None:
            self.table = torch.linspace(0.5, 1.5, 12)
        return self.inner(x * self.table * self.inner.weight.mean())


class Kept(Dataset):
    """A dataset that keeps what it made."""

    def __init__(self, x, y):
        self.x, self.y, self.made = x, y, {}

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.made.setdefault(index, (self.x[index] * 2, self.y[index]))


def test_what_is_kept_from_an_evaluation_can_be_trained_with():
    dataset = Kept(*data())
    job = trainer(Positions())
    job.evaluate(dataset)
    job.predict(dataset)
    history = job.fit(dataset, epochs=2, validation_data=dataset, progress=False)
    assert history.epochs[1]["loss"] < history.epochs[0]["loss"]


def test_it_runs_at_the_precision_of_training():
    x, y = images()
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.Flatten(), nn.Linear(800, CLASSES))
    asked = Recipe(compute=Compute(precision="bf16", memory_format="channels_last"))
    job = trainer(model, recipe=asked)
    seen = []
    model[0].register_forward_hook(
        lambda m, i, output: seen.append(
            (output.dtype, i[0].is_contiguous(memory_format=torch.channels_last))
        )
    )
    job.evaluate(x, y)
    assert seen.pop()[0] == torch.float32
    job.fit((x, y), progress=False)
    seen.clear()
    job.evaluate(x, y)
    assert seen == [(torch.bfloat16, True)]


def test_before_any_fit_the_model_is_evaluated_as_it_is():
    x, y = data()
    job = trainer(network())
    assert job.resolved is None
    assert job.evaluate(x, y)["loss"] > 0


def test_after_a_fit_that_failed_at_once_too():
    x, y = data()
    job = trainer(network())
    job.fit((x, y), progress=False)
    with pytest.raises(DataError):
        job.fit((x[:, :5], y), progress=False)
    assert job.evaluate(x, y)["loss"] > 0


def test_broken_statistics_are_named_before_they_are_used():
    x, y = data()
    model = network()
    model[1].running_var[3] = float("nan")
    with pytest.raises(NumbersError, match=r"NaN or infinity in buffer 1\.running_var"):
        trainer(model).evaluate(x, y)
    with pytest.raises(NumbersError, match="found before prediction"):
        trainer(model).predict(x)


def test_no_data_is_an_error():
    with pytest.raises(DataError, match="the data is empty"):
        trainer(network()).evaluate(torch.zeros(0, 12), torch.zeros(0, dtype=torch.long))
