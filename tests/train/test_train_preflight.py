"""What would fail only after an epoch is said before the first step."""

import re
from queue import SimpleQueue

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from train_jobs import CLASSES, FEATURES, data, figures, network, same, same_state, trainer

import flatout
from flatout.data.execution.batch_sampler import last_batch
from flatout.data.source import as_source, last_batch_of
from flatout.errors import CheckpointError, DataError, ModelError
from flatout.train import fit as fit_room
from flatout.train.callbacks import BestCheckpoint, EarlyStopping
from flatout.train.evaluate import look_at_validation

X, Y = data(samples=97)


def refused(kind, job, *given, **options):
    """The error of a fit, before whose first step it comes."""
    before = [p.clone() for p in job.model.parameters()]
    with pytest.raises(kind) as caught:
        job.fit(*given, progress=False, **options)
    assert job.loop.step_count == 0
    assert all(torch.equal(a, b) for a, b in zip(before, job.model.parameters(), strict=True))
    return caught.value


# -- a last batch of one sample --------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        lambda: (X, Y),
        lambda: (DataLoader(TensorDataset(X, Y), batch_size=16, shuffle=True),),
        lambda: (flatout.data.arrays(X, Y).shuffle(seed=1).batch(16).repeat(2),),
    ],
    ids=["arrays", "loader", "pipeline"],
)
def test_a_last_batch_of_one_sample_under_batch_norm(given):
    given = given()
    size = {"batch_size": 16} if len(given) == 2 else {}
    error = refused(DataError, trainer(network()), *given, **size)
    assert "the last batch of an epoch has one sample" in error.what
    assert "samples in batches of 16" in error.what
    for way in ("drop_last=True", 'last="drop"', 'last="pad"'):
        assert way in error.do


@pytest.mark.parametrize(
    ("sizes", "where"), [((16, 1), "batch 2 of the first epoch"), ((16, 16, 1), "step 3")]
)
def test_one_sample_of_a_source_that_tells_no_length(sizes, where):
    job = trainer(network())
    with pytest.raises(DataError, match="a batch has one sample, which BatchNorm") as caught:
        job.fit(lambda: iter([(X[:n], Y[:n]) for n in sizes]), epochs=1, progress=False)
    assert caught.value.where == where
    assert 'last="drop"' in caught.value.do


@pytest.mark.parametrize(
    "given",
    [
        {"x": (X, Y), "batch_size": 16, "drop_last": True},
        {"x": DataLoader(TensorDataset(X, Y), batch_size=16, drop_last=True)},
        {"x": flatout.data.arrays(X, Y).batch(16, last="drop")},
        {"x": flatout.data.arrays(X, Y).batch(16, last="pad")},
        {"x": flatout.data.arrays(X, Y).repeat(2).batch(16)},
    ],
    ids=["arrays", "loader", "drop", "pad", "passes that go on"],
)
def test_what_the_error_says_helps(given):
    job = trainer(network())
    job.fit(**given, epochs=1, progress=False)
    assert job.history.epochs


def test_where_one_sample_does_no_harm():
    for model in (
        network(norm=False),
        nn.Sequential(
            nn.Unflatten(1, (3, 2, 2)), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 3)
        ),
    ):
        trainer(model).fit((X, Y), batch_size=16, progress=False)


def test_the_size_of_a_last_batch():
    assert [last_batch(n, 16, False) for n in (15, 16, 17, 32)] == [15, 16, 1, 16]
    assert last_batch(17, 16, True) == 16
    rows = flatout.data.arrays(X, Y)
    for source, size in (
        (as_source(X, Y, batch_size=16), 1),
        (as_source(X, Y, batch_size=16, drop_last=True), 16),
        (as_source(TensorDataset(X, Y), batch_size=10), 7),
        (as_source(DataLoader(TensorDataset(X, Y), 10, drop_last=True)), 10),
        (as_source(lambda: iter([(X, Y)])), None),
        (rows.batch(16), 1),
        (rows.batch(16).repeat(3), 1),
        (rows.repeat(3).batch(16), 3),
        (rows.batch(16, last="pad"), 16),
    ):
        if size is not None:
            assert last_batch_of(source) == size
            assert min(b.size for b in source.batches(0)) == size


# -- monitors and folders --------------------------------------------------------------------------


@pytest.mark.parametrize("callback", [EarlyStopping, BestCheckpoint])
def test_a_misspelt_monitor(callback, tmp_path):
    job = trainer(network(), metrics=["accuracy"], run=tmp_path / "run")
    error = refused(
        ModelError,
        job,
        data(),
        validation_data=data(1),
        callbacks=[callback("val_acuracy", mode="max")],
    )
    assert error.what.startswith("no figure is called 'val_acuracy'; there is: loss, ")
    assert "val_accuracy" in error.what
    assert error.do == "did you mean 'val_accuracy'?"
    # Of a name without a known end, the name is the mistake, too, and not the mode.
    error = refused(
        ModelError, job, data(), validation_data=data(1), callbacks=[callback("val_los")]
    )
    assert error.what.startswith("no figure is called 'val_los'; there is: loss, ")
    assert error.do == "did you mean 'val_loss'?"
    error = refused(ModelError, job, data(), callbacks=[callback()])
    assert error.do == "give validation_data to fit"


def test_a_figure_that_another_callback_adds():
    class Adds(flatout.Callback):
        def on_evaluate_end(self, state):
            state.logs["f1"] = 1.0

    stops = EarlyStopping("f1", patience=1)
    history = trainer(network()).fit(
        data(), epochs=5, validation_data=data(1), callbacks=[Adds(), stops], progress=False
    )
    assert len(history.epochs) == 2


def test_a_checkpoint_of_the_best_without_a_place():
    error = refused(
        CheckpointError,
        trainer(network()),
        data(),
        validation_data=data(1),
        callbacks=[BestCheckpoint()],
    )
    assert "run=" in error.do


def test_a_run_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    job = trainer(network(), run=tmp_path / "file" / "run")
    refused(CheckpointError, job, data())


# -- validation data -------------------------------------------------------------------------------


def late(label):
    """A label beyond the batches that are looked at."""
    x, y = data(1)
    y[140] = label
    return x, y


@pytest.mark.parametrize(
    ("validation", "words"),
    [
        (lambda x, y: (x[:, :5], y), "150x5|cannot be multiplied"),
        (lambda x, y: (x.long(), y), "convert inputs to float32, found int64"),
        (lambda x, y: (x, y.float()), "cross_entropy does not take this batch"),
        (lambda x, y: (x, y[:, None]), "cross_entropy does not take this batch"),
        (lambda x, y: (x, y + 1), r"label 3 is not in 0\.\.2"),
        (lambda x, y: late(7), r"label 7 is not in 0\.\.2"),
    ],
    ids=["shape", "dtype", "float labels", "label shape", "labels", "a late label"],
)
def test_validation_data_that_do_not_fit(validation, words):
    error = refused(DataError, trainer(network()), data(), validation_data=validation(*data(1)))
    assert error.what.startswith("the validation data do not fit: ")
    assert re.search(words, str(error))


def test_a_late_label_is_named_before_the_first_step_with_its_sample():
    error = refused(DataError, trainer(network()), late(7))
    assert (error.what, error.where) == ("label 7 is not in 0..2", "sample 140")


def test_validation_targets_that_would_broadcast():
    x, _ = data()
    job = trainer(nn.Linear(FEATURES, 1), loss=nn.MSELoss(), metrics=[F.l1_loss])
    error = refused(ModelError, job, (x, x.sum(1, keepdim=True)), validation_data=(x, x.sum(1)))
    assert "the validation data do not fit: the loss MSELoss would compare" in error.what


class Draws(nn.Module):
    """Draws random numbers and counts its calls, in evaluation as well."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.count = 0

    def forward(self, x):
        self.calls += 1
        self.count += 1
        return x + 0.01 * torch.randn_like(x)


def loaders():
    x, y = data(1)
    generator = torch.Generator().manual_seed(3)
    yield lambda: (x, y)
    yield lambda: TensorDataset(x, y)
    yield lambda: DataLoader(TensorDataset(x, y), batch_size=20, shuffle=True, generator=generator)
    yield lambda: flatout.data.arrays(x, y).shuffle(seed=2).batch(20)
    yield lambda: lambda: ((x[i : i + 20], y[i : i + 20]) for i in range(0, 150, 20))


@pytest.mark.parametrize("given", list(loaders()))
def test_the_look_leaves_no_trace(given, monkeypatch):
    """The same bits as without it: weights, statistics, random numbers, metrics, figures."""

    def fitted():
        torch.manual_seed(0)
        model = nn.Sequential(Draws(), network())
        job = trainer(model, metrics=["accuracy"])
        torch.manual_seed(5)
        np.random.seed(5)
        history = job.fit(data(), epochs=2, validation_data=given(), progress=False)
        return job, figures(history), torch.get_rng_state(), model[0].count

    looked = []
    monkeypatch.setattr(
        fit_room,
        "look_at_validation",
        lambda *a: looked.append(look_at_validation(*a)) or looked[0],
    )
    ours = fitted()
    assert looked == [["accuracy"]]
    monkeypatch.setattr(fit_room, "look_at_validation", lambda *_: ["accuracy"])
    generators = getattr(given(), "generator", None)
    if generators is not None:
        generators.manual_seed(3)
    theirs = fitted()
    if generators is None:
        assert ours[1] == theirs[1]
    assert same(ours[0].model, theirs[0].model)
    assert same_state(ours[0].optimizer, theirs[0].optimizer)
    assert torch.equal(ours[2], theirs[2])
    assert ours[3] == theirs[3]


def test_a_look_costs_two_passes_of_a_training_batch_at_most():
    seen = SimpleQueue()  # a check restores a list

    class Sizes(nn.Module):
        def forward(self, x):
            seen.put((len(x), self.training))
            return x

    model = nn.Sequential(Sizes(), nn.Linear(FEATURES, CLASSES))
    trainer(model).fit(data(), batch_size=10, validation_data=data(1), progress=False)
    calls = [seen.get() for _ in range(seen.qsize())]
    assert [size for size, training in calls if not training] == [10, 150]


def test_a_metric_that_wants_more_than_a_few_samples():
    torchmetrics = pytest.importorskip("torchmetrics")

    class Many(torchmetrics.Metric):
        def __init__(self):
            super().__init__()
            self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

        def update(self, output, target):
            self.count += len(target)

        def compute(self):
            if self.count < 100:
                raise ValueError("too few samples")
            return self.count.float()

    history = trainer(network(), metrics={"many": Many()}).fit(
        data(), validation_data=data(1), callbacks=[EarlyStopping("val_many", mode="max")],
        progress=False,
    )  # fmt: skip
    assert history.epochs[0]["val_many"] == 150


def test_a_resumed_fit_goes_on_with_its_metrics(tmp_path):
    def run(name, **options):
        job = trainer(network(), metrics=["accuracy"], run=tmp_path / name)
        history = job.fit(data(), validation_data=data(1), progress=False, **options)
        return figures(history)

    whole = run("whole", epochs=4)
    run("parts", epochs=2)
    assert run("parts", epochs=4, resume=True) == whole


def test_quiet_is_quiet():
    said = []
    flatout.Trainer(network(), say=said.append).fit(data(), validation_data=data(1), progress=False)
    assert not any("validation" in line for line in said)
