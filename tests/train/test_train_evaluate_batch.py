"""The size of an evaluation's batches: measured on its own samples, each of which counts once."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from train_jobs import CLASSES, quiet

import flatout
from flatout.data import Arrays, as_source
from flatout.data.batches.batch import Batch
from flatout.train.evaluate_batch import EvaluateBatch, bytes_of_sample, rebatched

pytestmark = pytest.mark.usefixtures("one_thread")


class Clock:
    """Seconds that pass where a model computes."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def batches(samples: int, size: int):
    x = torch.arange(float(samples))[:, None]
    return list(as_source(Arrays(x, x.long()[:, 0]), batch_size=size, shuffle=False).batches(0, 0))


def passed(chooser: EvaluateBatch, clock: Clock, seconds, samples: int, size: int):
    """Sizes and samples of a pass whose batches take what a function of their size says."""
    sizes, numbers = [], []
    for batch in chooser.over(batches(samples, size), lambda batch: batch.inputs):
        clock.now += seconds(batch.size)
        sizes.append(batch.size)
        numbers += batch.inputs.flatten().tolist()
        assert batch.inputs.flatten().tolist() == batch.targets.tolist() == batch.indices.tolist()
    assert numbers == list(range(samples))
    return sizes


def choosing(seconds, samples: int, size: int):
    clock, said = Clock(), []
    chooser = EvaluateBatch(said.append, clock)
    sizes = passed(chooser, clock, seconds, samples, size)
    later = passed(chooser, clock, seconds, samples, size)
    return sizes, later, chooser, said


def test_larger_where_each_batch_costs():
    sizes, later, chooser, said = choosing(lambda size: 0.1 + 1e-3 * size, 65_536, 32)
    assert sizes[:2] == [32, 32]
    assert sizes[-2] == 2048
    assert set(later) == {2048}
    assert [(one["a"], one["b"], one["chosen"]) for one in chooser.trials] == [
        (32, 128, "b"), (128, 512, "b"), (512, 2048, "b"),
    ]  # fmt: skip
    assert len(said) == 1
    assert said[0].startswith("evaluation takes 2,048 samples at a time: ")


def test_smaller_where_large_ones_leave_the_cache():
    cost = {True: 2e-3, False: 1e-3}
    sizes, later, chooser, _ = choosing(lambda size: size * cost[size > 70], 32_768, 256)
    assert sizes[0] == 256
    assert set(later) == {64}
    assert [one["chosen"] for one in chooser.trials] == ["a", "b", "a"]


def test_as_they_come_where_nothing_is_gained_or_the_pass_is_short():
    _, later, chooser, said = choosing(lambda size: 1e-3 * size, 8192, 64)
    assert set(later) == {64}
    assert not said
    _, later, chooser, said = choosing(lambda size: 1e-4, 8192, 64)
    assert set(later) == {64}
    assert not chooser.trials


def test_what_does_not_fit_together_is_not_joined():
    some = batches(24, 8)
    other = some[1]._replace(inputs=some[1].inputs.double())
    assert [batch.size for batch in rebatched([some[0], other, some[2]], 64)] == [8, 8, 8]
    padded = some[1]._replace(padding=3)
    found = list(rebatched([some[0], padded, some[2]], 64))
    assert [(batch.size, batch.padding) for batch in found] == [(16, 3), (8, 0)]
    copies = [batch._replace(copies=2) for batch in some]
    assert [batch.size for batch in rebatched(copies, 64)] == [8, 8, 8]


def test_a_batch_that_is_cut_keeps_what_only_fills_it_up_at_its_end():
    batch = batches(24, 24)[0]._replace(padding=10)
    assert [(b.size, b.padding) for b in rebatched([batch], 8)] == [(8, 0), (8, 2), (8, 8)]


@pytest.mark.parametrize(
    ("run", "depends"),
    [
        (lambda batch: batch.inputs * 2, False),
        (lambda batch: (batch.inputs + 1, {"more": batch.targets}), False),
        (lambda batch: batch.inputs - batch.inputs.mean(0), True),
        (lambda batch: batch.inputs.mean(), True),
        (lambda batch: batch.inputs[:1], True),
        (lambda batch: None, True),
    ],
)
def test_whether_samples_know_of_each_other(run, depends):
    assert (bytes_of_sample(run, batches(64, 64)[0]) is None) is depends


def test_bytes_of_all_values_are_counted():
    batch = Batch(torch.zeros(64, 100), None, None, None, 64)
    assert bytes_of_sample(lambda batch: (batch.inputs + 1).relu(), batch) == 800


class Watched(nn.Module):
    """Slow for each batch, whatever is in it."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.inner, self.clock, self.sizes = nn.Linear(4, CLASSES), clock, []

    def forward(self, x):
        self.clock.now += 0.1
        self.sizes.append(len(x))
        return self.inner(x)


def watched_job(**options):
    torch.manual_seed(0)
    clock = Clock()
    model = Watched(clock)
    job = flatout.Trainer(model, say=quiet, **options)
    job.loop.evaluation.batch_size = EvaluateBatch(quiet, clock)
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(4096, 4, generator=draw)
    return job, model, x, torch.randint(0, CLASSES, (4096,), generator=draw)


def test_loss_metrics_and_predictions_stay():
    job, model, x, y = watched_job(metrics=["accuracy"])
    weight = torch.rand(4096, generator=torch.Generator().manual_seed(1))
    found = job.evaluate((x, y, weight), batch_size=32)
    assert max(model.sizes) >= 512
    predicted = job.predict(x, batch_size=32)
    with torch.no_grad():
        output = model.inner(x)
    each = F.cross_entropy(output, y, reduction="none")
    assert found["loss"] == pytest.approx(float((each * weight).sum() / weight.sum()), rel=1e-5)
    assert found["accuracy"] == pytest.approx(float((output.argmax(1) == y).float().mean()))
    assert torch.allclose(predicted, output, atol=1e-6)
    assert not predicted.is_inference()


def mean_of_batch(output, target):
    return F.cross_entropy(output, target)


@pytest.mark.parametrize(
    "options",
    [{"allow": "exact"}, {"loss": mean_of_batch}, {"metrics": {"mine": mean_of_batch}}],
)
def test_as_they_come_where_the_size_may_matter(options):
    job, model, x, y = watched_job(**options)
    job.evaluate((x, y), batch_size=32)
    assert set(model.sizes) == {32}


def test_batches_of_an_iterable_are_not_kept():
    job, model, x, y = watched_job()
    job.evaluate(lambda: ((x[at : at + 32], y[at : at + 32]) for at in range(0, 4096, 32)))
    assert set(model.sizes) == {32}


def test_a_validation_chooses_once_for_all_epochs():
    job, model, x, y = watched_job()
    clock = model.clock

    class Choose(flatout.Callback):
        def on_fit_start(self, state):
            state.trainer.loop.evaluation.batch_size = EvaluateBatch(quiet, clock)

        def on_epoch_start(self, state):
            model.sizes.clear()

        def on_evaluate_end(self, state):
            sizes.append(model.sizes[16:])

    sizes: list[list[int]] = []
    job.fit(
        (x[:64], y[:64]), batch_size=4, epochs=2, validation_data=(x, y), validation_batch_size=32,
        callbacks=[Choose()], progress=False,
    )  # fmt: skip
    assert sizes[0][0] == 32
    assert min(sizes[1]) >= 512
