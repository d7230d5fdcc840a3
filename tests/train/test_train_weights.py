"""Weights of classes and samples, and the last samples held out, as Keras users know them."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from train_jobs import CLASSES, close, data, network, plain_fit, same, trainer

import flatout
from flatout.data.batches.batch import Batch
from flatout.data.randomness import order
from flatout.errors import DataError, ModelError
from flatout.recipe import Memory, Recipe
from flatout.train.losses.class_weight import ClassWeight
from flatout.train.losses.losses import as_loss

pytestmark = pytest.mark.usefixtures("one_thread")

CLASS_WEIGHT = {0: 1.0, 2: 5.0}
TABLE = torch.tensor([1.0, 1.0, 5.0])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def weighted_fit(model, x, y, weight, loss, epochs=2, batch_size=32):
    """The loop that a user would write: each sample's loss times its weight, over all weights."""
    optimizer, means = sgd(model), []
    for epoch in range(epochs):
        model.train()
        total = weights = 0.0
        for at in torch.from_numpy(order(len(x), 0, epoch)).split(batch_size):
            optimizer.zero_grad()
            each = loss(model(x[at]), y[at]) * weight[at]
            (each.sum() / weight[at].sum()).backward()
            optimizer.step()
            total, weights = total + each.sum().item(), weights + weight[at].sum().item()
        means.append(total / weights)
    return means


def test_a_weight_of_a_class_that_there_is_not():
    x, y = data()
    with pytest.raises(ModelError, match=rf"class {CLASSES}, .* 0\.\.{CLASSES - 1}"):
        trainer(network()).fit(x, y, class_weight={CLASSES: 1.0}, progress=False)
    binary = trainer(nn.Linear(x.shape[1], 1), loss="binary_cross_entropy")
    binary.fit(x, y % 2, class_weight={1: 2.0}, progress=False)
    with pytest.raises(ModelError, match=r"class 5, and the model's classes are 0\.\.1"):
        binary.fit(x, y % 2, class_weight={5: 1.0}, progress=False)
    both = trainer(Two(), loss={"a": "cross_entropy", "b": "mse"})
    with pytest.raises(ModelError, match=r"output 'a': class_weight has a weight for class 5"):
        both.fit(x, {"a": y % 2, "b": x[:, 0]}, class_weight={"a": {5: 1.0}}, progress=False)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(12, 2), nn.Linear(12, 1)

    def forward(self, x):
        return {"a": self.a(x), "b": self.b(x)[:, 0]}


@pytest.mark.parametrize("how", ["whole", "micro-batches", "accumulated"])
def test_class_weights_are_those_of_torchs_loss(how):
    x, y = data()
    ours, theirs = network(norm=False, dropout=0.0), network(norm=False, dropout=0.0)
    batch = 32 if how == "accumulated" else 64
    options = {
        "whole": {},
        "micro-batches": {"recipe": Recipe(memory=Memory(micro_batch=10))},
        "accumulated": {"accumulate": 2},
    }[how]
    job = trainer(ours, optimizer=sgd(ours), **options)
    history = job.fit(
        (x, y), batch_size=batch, epochs=2, class_weight=CLASS_WEIGHT, validation_data=(x, y)
    )
    plain_fit(
        theirs, sgd(theirs), x, y, batch_size=64,
        loss=lambda output, target: F.cross_entropy(output, target, weight=TABLE),
    )  # fmt: skip
    assert close(ours, theirs, 1e-6)
    # Validation is of the data as they are.
    assert history.history["val_loss"][-1] == pytest.approx(
        F.cross_entropy(ours(x), y).item(), rel=1e-5
    )
    # The next fit does not remember.
    job.fit((x, y), batch_size=batch, epochs=2)
    assert job.objective._class_weight is None


def test_class_weights_from_a_loader_times_the_samples_own():
    x, y = data()
    own = torch.rand(len(x)) + 0.5
    ours, theirs = network(norm=False, dropout=0.0), network(norm=False, dropout=0.0)
    loader = DataLoader(TensorDataset(x, y, own), batch_size=32)
    trainer(ours, optimizer=sgd(ours)).fit(loader, class_weight=CLASS_WEIGHT)
    optimizer = sgd(theirs)
    for xs, ys, ws in loader:
        optimizer.zero_grad()
        weight = ws * TABLE[ys]
        each = F.cross_entropy(theirs(xs), ys, reduction="none") * weight
        (each.sum() / weight.sum()).backward()
        optimizer.step()
    assert close(ours, theirs, 1e-6)


LOSSES = {
    "cross_entropy": (network, lambda o, t: F.cross_entropy(o, t, reduction="none"), None),
    "mse": (
        lambda **_: nn.Linear(12, 1),
        lambda o, t: F.mse_loss(o[:, 0], t, reduction="none"),
        torch.float32,
    ),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("form", ["torch", "numpy, float64"])
def test_sample_weights_are_in_the_loss_exactly(name, form):
    make, loss, dtype = LOSSES[name]
    x, y = data()
    y = y if dtype is None else y.to(dtype)
    weight = torch.rand(len(x)) * 3
    weight[::7] = 0
    torch.manual_seed(0)
    theirs = make(norm=False, dropout=0.0)
    torch.manual_seed(0)
    ours = make(norm=False, dropout=0.0)
    means = weighted_fit(theirs, x, y, weight, loss)
    given = weight if form == "torch" else weight.double().numpy()
    job = trainer(ours, loss=name, optimizer=sgd(ours))
    history = job.fit(x, y, batch_size=32, epochs=2, sample_weight=given)
    assert close(ours, theirs, 1e-6)
    assert history.history["loss"] == pytest.approx(means, rel=1e-5)
    found = job.evaluate((x, y), sample_weight=given)["loss"]
    with torch.no_grad():
        expected = (loss(ours(x), y) * weight).sum() / weight.sum()
    assert found == pytest.approx(expected.item(), rel=1e-5)
    # As a part of the data they are the same.
    assert job.evaluate((x, y, weight))["loss"] == pytest.approx(found, rel=1e-6)


@pytest.mark.parametrize("kind", ["x, y", "one tuple", "TensorDataset", "Arrays", "weighted"])
def test_the_last_samples_are_held_out_before_any_shuffling(kind):
    x, y = data()
    split, weight = 112, torch.rand(len(x))  # 75% of 150, rounded down as Keras does
    ours, theirs = network(norm=False, dropout=0.0), network(norm=False, dropout=0.0)
    weights = {"sample_weight": weight} if kind == "weighted" else {}
    given = {
        "x, y": (x.numpy(), y.numpy()),
        "one tuple": ((x, y),),
        "TensorDataset": (TensorDataset(x, y),),
        "Arrays": (flatout.data.Arrays(x, y),),
        "weighted": (x, y),
    }[kind]
    history = trainer(ours, optimizer=sgd(ours)).fit(
        *given, batch_size=32, epochs=2, validation_split=0.25, **weights
    )
    parts = ((x[:split], y[:split]), (x[split:], y[split:]))
    if weights:
        parts = ((*parts[0], weight[:split]), (*parts[1], weight[split:]))
    expected = trainer(theirs, optimizer=sgd(theirs)).fit(
        parts[0], batch_size=32, epochs=2, validation_data=parts[1]
    )
    assert same(ours, theirs)
    assert history.history["val_loss"] == expected.history["val_loss"]
    assert history.history["loss"] == expected.history["loss"]


def test_validation_data_win_over_a_split():
    x, y = data()
    ours, theirs = network(), network()
    for model, split in ((ours, 0.5), (theirs, 0.0)):
        torch.manual_seed(3)
        trainer(model, optimizer=sgd(model)).fit(
            x, y, batch_size=32, validation_data=(x, y), validation_split=split
        )
    assert same(ours, theirs)


@pytest.mark.slow
def test_classes_are_those_of_keras():
    pytest.importorskip("keras")
    from keras.src.trainers.data_adapters.data_adapter_utils import class_weight_to_sample_weights

    given = {0: 0.5, 1: 3.0, 4: 2.0}
    draw = np.random.default_rng(0)
    for name, targets in {
        "cross_entropy": draw.integers(0, 7, 50),
        "nll": draw.integers(0, 3, 50),
        "binary_cross_entropy": draw.integers(0, 2, (50, 1)).astype("float32"),
        "mse": draw.random(50) * 4,
        "mae": draw.integers(0, 5, 50).astype("float32"),
    }.items():
        batch = Batch(torch.zeros(50, 1), torch.from_numpy(targets), None, None, 50)
        found = ClassWeight(given, as_loss(name))(batch).weight
        np.testing.assert_array_equal(found, class_weight_to_sample_weights(targets, given))
    chances = draw.random((50, CLASSES)).astype("float32")
    batch = Batch(torch.zeros(50, 1), torch.from_numpy(chances), None, None, 50)
    found = ClassWeight(given, as_loss("cross_entropy"))(batch).weight
    np.testing.assert_array_equal(found, class_weight_to_sample_weights(chances, given))


def test_labels_that_do_not_count_weigh_nothing():
    batch = Batch(torch.zeros(4, 1), torch.tensor([0, -100, 1, 9]), None, None, 4)
    assert ClassWeight({1: 2.0}, as_loss("nll"))(batch).weight.tolist() == [1, 1, 2, 1]
    x, y = data()
    y[::3] = -100
    model = network(norm=False, dropout=0.0)
    before = F.cross_entropy(model(x), y, weight=TABLE).item()
    history = trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0)).fit(
        (x, y), batch_size=32, class_weight=CLASS_WEIGHT
    )
    assert history.history["loss"] == pytest.approx([before], rel=1e-5)


def own(output, target):
    return F.cross_entropy(output, target)


X, Y = data()


@pytest.mark.parametrize(
    ("error", "options", "words"),
    [
        (ModelError, {"class_weight": [1.0, 2.0]}, "maps class numbers to weights, found a list"),
        (ModelError, {"class_weight": {"cat": 2.0}}, "found 'cat': 2.0"),
        (ModelError, {"class_weight": {1: -1.0}}, "found 1: -1.0"),
        (ModelError, {"class_weight": {1: float("nan")}}, "found 1: nan"),
        (DataError, {"sample_weight": [1.0] * 150}, "a number per sample, found a list"),
        (DataError, {"sample_weight": torch.ones(149)}, "differ in length: 150 and 149"),
        (DataError, {"sample_weight": torch.ones(150, 2)}, "one number per sample, found shape"),
        (DataError, {"validation_split": 1.0}, "leaves 0 of 150 samples"),
        (DataError, {"validation_split": -0.2}, "leaves 180 of 150"),
    ],
)
def test_what_makes_no_sense_is_refused(error, options, words):
    with pytest.raises(error, match=words):
        trainer(network()).fit(X, Y, batch_size=32, **options)


def test_data_that_are_no_arrays_are_told_what_to_do():
    loader = DataLoader(TensorDataset(X, Y), batch_size=32)
    with pytest.raises(DataError, match=r"sample_weight goes with arrays(.|\n)*give \(x, y, wei"):
        trainer(network()).fit(loader, sample_weight=torch.ones(150))
    with pytest.raises(DataError, match="validation_split needs arrays"):
        trainer(network()).fit(loader, validation_split=0.2)
    with pytest.raises(DataError, match="beside data that have their own weights"):
        trainer(network()).fit((X, Y, torch.ones(150)), sample_weight=torch.ones(150))
    with pytest.raises(ModelError, match="weights of samples or classes were given, but the loss"):
        trainer(network(), loss=own).fit(X, Y, class_weight=CLASS_WEIGHT)
    tokens = torch.zeros(150, 4, dtype=torch.int64)
    model = nn.Sequential(nn.Linear(12, 12), nn.Unflatten(1, (3, 4)))
    with pytest.raises(ModelError, match=r"one class per sample, found targets of shape \(32, 4\)"):
        trainer(model).fit(X, tokens, batch_size=32, class_weight=CLASS_WEIGHT)
