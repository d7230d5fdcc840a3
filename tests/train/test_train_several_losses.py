"""Models of several outputs against the loop that a user would write."""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from train_jobs import FEATURES, close, data, trainer

from flatout.data.randomness import order
from flatout.errors import CheckpointError, DataError, ModelError
from flatout.recipe import Memory, Recipe

pytestmark = pytest.mark.usefixtures("one_thread")

X, LABELS = data()
SOME = LABELS.clone()  # labels that are there for a part of the samples, unevenly
SOME[torch.rand(len(X), generator=torch.Generator().manual_seed(1)) < 0.5] = -100
SOME[:40] = -100
NUMBERS = X[:, :1] * 2 + X[:, 1:2]
TARGETS = {"kind": SOME, "size": NUMBERS}
LOSSES = {"kind": "cross_entropy", "size": "mse"}
WEIGHTS = {"size": 0.3}


class Pair(NamedTuple):
    size: torch.Tensor
    kind: torch.Tensor


class Two(nn.Module):
    """A class and a number of each sample."""

    def __init__(self, form: str = "dict") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form = form
        self.body, self.kind, self.size = nn.Linear(FEATURES, 8), nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, x):
        h = self.body(x).tanh()
        kind, size = self.kind(h), self.size(h)
        if self.form == "dict":
            return {"kind": kind, "size": size, "hidden": h}
        return Pair(size, kind) if self.form == "named" else (kind, size)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def total(output, kind, size, table=None):
    """The total loss, and its parts with what each was divided by."""
    a = F.cross_entropy(output["kind"], kind, weight=table, reduction="sum")
    counted = (kind != -100).float() if table is None else table[kind.clamp_min(0)] * (kind >= 0)
    b = F.mse_loss(output["size"], size)
    n = counted.sum().clamp_min(1e-12)
    return a / n + 0.3 * b, (a.item(), n.item()), (b.item() * len(size), len(size))


def plain_fit(model, epochs=2, batch_size=32, kinds=SOME, table=None):
    optimizer, history = sgd(model), []
    for epoch in range(epochs):
        sums = torch.zeros(2, 2, dtype=torch.float64)
        for at in torch.from_numpy(order(len(X), 0, epoch)).split(batch_size):
            optimizer.zero_grad()
            loss, *parts = total(model(X[at]), kinds[at], NUMBERS[at], table)
            loss.backward()
            optimizer.step()
            sums += torch.tensor(parts)
        a, b = (sums[:, 0] / sums[:, 1]).tolist()
        history.append({"loss": a + 0.3 * b, "kind_loss": a, "size_loss": b})
    return history


HOW = {
    "whole": (32, {}),
    "micro-batches": (32, {"recipe": Recipe(memory=Memory(micro_batch=5))}),
    "accumulated": (8, {"accumulate": 4}),
}


@pytest.mark.parametrize("how", HOW)
def test_named_outputs_are_a_plain_loop(how):
    ours, theirs = Two(), Two()
    batch_size, options = HOW[how]
    expected = plain_fit(theirs)
    job = trainer(ours, loss=LOSSES, loss_weights=WEIGHTS, optimizer=sgd(ours), **options)
    history = job.fit(X, TARGETS, batch_size=batch_size, epochs=2)
    assert close(ours, theirs, 1e-6)
    for logs, wanted in zip(history.epochs, expected, strict=True):
        assert list(logs)[:3] == ["loss", "kind_loss", "size_loss"]
        assert {name: logs[name] for name in wanted} == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("form", ["tuple", "named"])
def test_tuples_are_told_by_their_order_and_named_ones_by_name(form):
    ours, theirs = Two(form), Two()
    plain_fit(theirs, epochs=1)
    targets = TARGETS if form == "named" else (SOME, NUMBERS)
    trainer(ours, loss=LOSSES, loss_weights=WEIGHTS, optimizer=sgd(ours)).fit(
        X, targets, batch_size=32
    )
    assert close(ours, theirs, 1e-6)


def test_metrics_of_each_output_and_of_all():
    def both(outputs, targets):
        assert set(targets) == {"kind", "size"}
        return outputs["kind"].abs().mean() + outputs["size"].abs().mean()

    def error(output, target):
        return (output - target).abs().mean()

    model = Two()
    metrics = {"kind": ["accuracy"], "size": {"mae": "mae", "own": error}, "both": both}
    job = trainer(model, loss=LOSSES, loss_weights=WEIGHTS, metrics=metrics)
    history = job.fit(X, TARGETS, batch_size=32, validation_data=(X, TARGETS))
    names = ["loss", "kind_loss", "size_loss", "kind_accuracy", "size_mae", "size_own", "both"]
    assert list(history.epochs[0]) == [*names, *(f"val_{name}" for name in names), "seconds"]
    figures = job.evaluate(X, TARGETS, batch_size=64)
    assert list(figures) == names
    with torch.no_grad():
        found = model(X)
    loss, (kind, counted), (size, samples) = total(found, SOME, NUMBERS)
    right = (found["kind"].argmax(1) == SOME).sum() / (SOME >= 0).sum()
    wanted = {
        "loss": loss.item(),
        "kind_loss": kind / counted,
        "size_loss": size / samples,
        "kind_accuracy": right.item(),
        "size_mae": error(found["size"], NUMBERS).item(),
        "size_own": error(found["size"], NUMBERS).item(),
        "both": both(found, TARGETS).item(),
    }
    assert figures == pytest.approx(wanted, rel=1e-5)
    assert {n: history.epochs[0][f"val_{n}"] for n in names} == pytest.approx(wanted, rel=1e-5)
    assert set(job.predict(X)) == {"kind", "size", "hidden"}


@pytest.mark.parametrize("micro", ["whole", 5])
def test_weights_of_classes_and_of_samples(micro):
    table = torch.tensor([1.0, 2.0, 5.0])
    options = {"recipe": Recipe(memory=Memory(micro_batch=micro)), "loss_weights": WEIGHTS}
    ours, theirs = Two(), Two()
    plain_fit(theirs, epochs=1, table=table)
    trainer(ours, loss=LOSSES, optimizer=sgd(ours), **options).fit(
        X, TARGETS, batch_size=32, class_weight={"kind": {1: 2.0, 2: 5.0}}
    )
    assert close(ours, theirs, 1e-6)

    weight = torch.rand(len(X))
    ours, theirs = Two(), Two()
    trainer(ours, loss=LOSSES, optimizer=sgd(ours), **options).fit(
        X, TARGETS, batch_size=32, sample_weight=weight
    )
    optimizer = sgd(theirs)
    for at in torch.from_numpy(order(len(X), 0, 0)).split(32):
        optimizer.zero_grad()
        output, kind, w = theirs(X[at]), SOME[at], weight[at]
        a = (F.cross_entropy(output["kind"], kind, reduction="none") * w).sum()
        b = (F.mse_loss(output["size"], NUMBERS[at], reduction="none")[:, 0] * w).sum()
        (a / (w * (kind >= 0)).sum() + 0.3 * b / w.sum()).backward()
        optimizer.step()
    assert close(ours, theirs, 1e-6)


@pytest.mark.slow
def test_a_resume_in_the_middle_of_an_epoch_goes_on_with_the_parts(tmp_path):
    from train_jobs import StopAt, figures, saving

    def job(run):
        return trainer(
            Two(), loss=LOSSES, metrics={"kind": "accuracy"}, run=run, recipe=saving(2)
        )  # fmt: skip

    expected = job(tmp_path / "a").fit(X, TARGETS, batch_size=32, epochs=2)
    stop = StopAt(3, lambda state: (state.trainer.save_checkpoint(), state.stop("enough")))
    job(tmp_path / "b").fit(X, TARGETS, batch_size=32, epochs=2, callbacks=[stop])
    history = job(tmp_path / "b").fit(
        X, TARGETS, batch_size=32, epochs=2, resume=True, callbacks=[StopAt(99, print)]
    )
    assert figures(history) == figures(expected)


def own_weight(output, target):
    return ((output - target) ** 2).sum(), (target > 0).sum()


def test_a_weight_known_too_late_is_refused_where_it_counts():
    losses = {"kind": "cross_entropy", "size": own_weight}
    trainer(Two(), loss=losses).fit(X, TARGETS, batch_size=32)  # whole: exact
    small = Recipe(memory=Memory(micro_batch=5))
    with pytest.raises(ModelError, match="output 'size': the loss returns its own weight"):
        trainer(Two(), loss=losses, recipe=small).fit(X, TARGETS, batch_size=32)
    mean = {"kind": "cross_entropy", "size": lambda o, t: ((o - t) ** 2).mean()}
    ours, theirs = Two(), Two()
    plain_fit(theirs, epochs=1)
    trainer(ours, loss=mean, loss_weights=WEIGHTS, optimizer=sgd(ours), recipe=small).fit(
        X, TARGETS, batch_size=32
    )
    assert close(ours, theirs, 1e-6)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss": {}}, "loss is an empty dict"),
        ({"loss": {"kind": "crossentropy"}}, "unknown loss 'crossentropy'"),
        ({"loss": "mse", "loss_weights": {"a": 1}}, "loss_weights are for several losses"),
        ({"loss": LOSSES, "loss_weights": {"sise": 1}}, "loss_weights names 'sise', and the outpu"),
        (
            {"loss": LOSSES, "loss_weights": [1, 2]},
            "loss_weights map outputs to numbers, found a l",
        ),
        ({"loss": LOSSES, "loss_weights": {"size": "1"}}, r"loss_weights\['size'\] is '1'"),
        ({"loss": LOSSES, "metrics": ["accuracy"]}, "metrics are given by output too"),
        ({"loss": LOSSES, "metrics": {"sise": ["mae"]}}, "metrics names 'sise', and the outputs"),
        ({"loss": LOSSES, "metrics": {"size": ["mea"]}}, "unknown metric 'mea'"),
        ({"loss": LOSSES, "metrics": {"size": {"loss": "mae"}}}, "metric would be called 'size_lo"),
        ({"loss": "mse", "metrics": {"loss": "mae"}}, "metric would be called 'loss'"),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(options, words):
    with pytest.raises(ModelError, match=words):
        trainer(Two(), **options)


def test_outputs_and_targets_that_do_not_fit_are_named():
    job = trainer(Two(), loss={"kind": "cross_entropy", "age": "mse"})
    with pytest.raises(
        ModelError, match=r"'kind', 'age'.*the outputs are a dict of 'kind', 'size'"
    ):
        job.fit(X, TARGETS)
    job = trainer(Two(), loss=LOSSES)
    with pytest.raises(ModelError, match="the targets are a Tensor"):
        job.fit(X, SOME)
    with pytest.raises(DataError, match=r"output 'kind': label 7 is not in 0\.\.2"):
        job.fit(X, {"kind": LABELS + 7 * (LABELS == 0), "size": NUMBERS})
    with pytest.raises(ModelError, match=r"class_weight is given by output too"):
        job.fit(X, TARGETS, class_weight={0: 2.0})
    with pytest.raises(ModelError, match=r"class_weight names 'sise'"):
        job.fit(X, TARGETS, class_weight={"sise": {0: 2.0}})


@pytest.mark.slow
def test_a_resume_names_what_has_changed(tmp_path):
    def job(weights, classes=None, **options):
        model = Two()
        job = trainer(model, loss=LOSSES, loss_weights=weights, run=tmp_path, **options)
        given = None if classes is None else {"kind": classes}
        return job.fit(X, TARGETS, epochs=2, batch_size=50, class_weight=given, resume=True)

    job(WEIGHTS, {1: 2.0})
    for weights, classes, words in (
        ({"size": 0.5}, {1: 2.0}, r"loss_weights\n +then: kind: 1, size: 0.3\n +now:  .*size: 0.5"),
        (WEIGHTS, {1: 3.0}, r"class_weight\n +then: kind: 0: 1, 1: 2\n +now:  kind: 0: 1, 1: 3"),
        (WEIGHTS, None, r"class_weight\n +then: kind: 0: 1, 1: 2\n +now:  none"),
    ):
        with pytest.raises(CheckpointError, match=words):
            job(weights, classes)
    assert len(job(WEIGHTS, {1: 2.0}).epochs) == 2
