import math
import warnings

import pytest
import torch
import torchmetrics
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import f1_score, roc_auc_score

from flatout.data.batches.batch import Batch
from flatout.errors import ModelError
from flatout.train.losses.metrics import accuracy, as_metrics
from flatout.values.tree import flatten, unflatten


def batch(targets):
    return Batch(torch.empty(len(targets), 1), targets, None, None, len(targets))


def value_of(name, *pairs):
    (metric,) = as_metrics([name]).values()
    for output, target in pairs:
        metric.update(output, batch(target))
    return metric.compute()


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# -- accuracy --------------------------------------------------------------------------------------


def test_accuracy_of_classes():
    scores = torch.tensor([[1.0, 2.0, 0.0], [3.0, 0.0, 0.0], [0.0, 0.0, 9.0]])
    assert value_of("accuracy", (scores, torch.tensor([1, 2, 2]))) == pytest.approx(2 / 3)
    assert value_of("accuracy", (scores, torch.tensor([[1], [2], [2]]))) == pytest.approx(2 / 3)
    assert value_of("accuracy", (scores.bfloat16(), torch.tensor([1, 2, 2]))) == pytest.approx(
        2 / 3
    )


@pytest.mark.parametrize("output", [(4,), (4, 1)])
@pytest.mark.parametrize("target", [(4,), (4, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_accuracy_of_logits(output, target, dtype):
    logits = torch.tensor([-1.0, 2.0, 3.0, -4.0]).reshape(output)
    labels = torch.tensor([0, 1, 0, 0]).to(dtype).reshape(target)
    assert value_of("accuracy", (logits, labels)) == 0.75


def test_accuracy_of_several_labels_per_sample():
    logits = torch.tensor([[1.0, -1.0], [1.0, 1.0]])
    assert value_of("accuracy", (logits, torch.tensor([[1, 1], [1, 1]]))) == 0.75


def test_accuracy_of_class_probabilities():
    scores, target = draw(8, 3), draw(8, 3, seed=1).softmax(1)
    wanted = (scores.argmax(1) == target.argmax(1)).float().mean()
    assert value_of("accuracy", (scores, target)) == pytest.approx(float(wanted))


def test_accuracy_of_segmentation():
    scores, target = draw(2, 3, 4, 5), torch.arange(40).reshape(2, 4, 5) % 3
    wanted = (scores.argmax(1) == target).float().mean()
    assert value_of("accuracy", (scores, target)) == pytest.approx(float(wanted))
    mask, truth = draw(2, 1, 4, 5), (torch.arange(40).reshape(2, 4, 5) % 2).float()
    wanted = ((mask[:, 0] > 0) == (truth > 0.5)).float().mean()
    assert value_of("accuracy", (mask, truth)) == pytest.approx(float(wanted))


def test_labels_that_are_ignored_do_not_count():
    scores = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    target = torch.tensor([0, -100, 0])
    assert value_of("accuracy", (scores, target)) == 0.5
    assert math.isnan(value_of("accuracy", (scores, torch.full((3,), -100))))
    pairs = [(scores, target), (scores, torch.full((3,), -100)), (scores[:1], target[:1])]
    assert value_of("accuracy", *pairs) == pytest.approx(2 / 3)


def test_accuracy_of_shapes_that_do_not_fit():
    with pytest.raises(ModelError, match=r"output \(3, 2\) and target \(4,\)"):
        accuracy(torch.zeros(3, 2), torch.zeros(4))


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5), seed=st.integers(0, 99))
@settings(max_examples=20)
def test_batches_of_any_size_give_the_accuracy_of_all(sizes, seed):
    scores, target = draw(sum(sizes), 3, seed=seed), torch.arange(sum(sizes)) % 3
    whole = value_of("accuracy", (scores, target))
    parts = zip(scores.split(sizes), target.split(sizes), strict=True)
    assert value_of("accuracy", *parts) == pytest.approx(whole)


# -- auc -------------------------------------------------------------------------------------------


@given(data=st.data(), count=st.integers(4, 40))
@settings(max_examples=30)
def test_auc_is_sklearns(data, count):
    label = st.lists(st.integers(0, 1), min_size=count, max_size=count)
    target = torch.tensor(data.draw(label.filter(lambda t: 0 < sum(t) < len(t))))
    score = st.floats(-40, 40, width=32) | st.integers(-2, 2).map(float)
    scores = torch.tensor(data.draw(st.lists(score, min_size=count, max_size=count)))
    cut = data.draw(st.integers(1, count - 1))
    # Some batches lie in 0..1 and others do not: all are scores of the same kind.
    pairs = [(scores[:cut], target[:cut]), (scores[cut:, None], target[cut:, None].float())]
    assert value_of("auc", *pairs) == pytest.approx(roc_auc_score(target, scores), abs=1e-9)


def test_auc_of_two_scores_per_sample():
    scores, target = draw(20, 2), torch.arange(20) % 2
    wanted = roc_auc_score(target, scores[:, 1] - scores[:, 0])
    assert value_of("auc", (scores, target)) == pytest.approx(wanted)
    assert value_of("auc", (scores.bfloat16().float(), target)) == value_of(
        "auc", (scores.bfloat16(), target)
    )


def test_auc_of_one_class_alone():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert math.isnan(value_of("auc", (draw(4), torch.ones(4))))
        assert math.isnan(value_of("auc"))


def test_auc_of_many_classes_is_refused():
    with pytest.raises(ModelError, match=r"one or two scores per sample, found output \(4, 3\)"):
        value_of("auc", (draw(4, 3), torch.ones(4)))


def test_auc_keeps_what_it_was_given():
    (metric,) = as_metrics(["auc"]).values()
    scores, target = draw(10), (torch.arange(10) % 2).float()
    metric.update(scores, batch(target))
    wanted = metric.compute()
    scores.zero_()  # sources reuse their buffers
    target.zero_()
    assert metric.compute() == wanted


# -- other metrics ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mse_and_mae(dtype):
    output, target = draw(6, 1).to(dtype), draw(6, seed=1)
    error = output.float()[:, 0] - target
    assert value_of("mse", (output, target)) == pytest.approx(float(error.square().mean()))
    assert value_of("mae", (output, target)) == pytest.approx(float(error.abs().mean()))
    assert value_of("mae", (output, torch.ones(6, dtype=torch.int64))) > 0
    with pytest.raises(ModelError, match="differ in shape"):
        value_of("mse", (draw(2, 3), draw(3, 2)))


def test_callables_give_a_mean_or_sum_and_weight():
    def mean(output, target):
        return (output - target).abs().mean()

    def weighed(output, target):
        return (output - target).abs().sum(), len(target)

    metrics = as_metrics([mean, weighed])
    for size in (3, 5):
        for metric in metrics.values():
            metric.update(draw(size), batch(draw(size, seed=1)))
    assert list(metrics) == ["mean", "weighed"]
    assert metrics["mean"].compute() == pytest.approx(metrics["weighed"].compute())


def f1():
    return torchmetrics.classification.MulticlassF1Score(num_classes=3, average="macro")


def test_torchmetrics():
    scores, target = draw(30, 3), torch.arange(30) % 3
    given = f1()
    metrics = as_metrics({"f1": given})
    for part in range(3):
        rows = slice(10 * part, 10 * part + 10)
        metrics["f1"].update(scores[rows], batch(target[rows]))
    wanted = f1_score(target, scores.argmax(1), average="macro")
    assert metrics["f1"].compute() == pytest.approx(wanted)
    # The user's own object is not fed.
    assert given._update_count == 0
    metrics["f1"].reset()
    assert math.isnan(metrics["f1"].compute())


def test_torchmetrics_that_give_several_numbers_are_refused():
    each = torchmetrics.classification.MulticlassRecall(num_classes=3, average=None)
    metrics = as_metrics([each])
    metrics["multiclassrecall"].update(draw(6, 3), batch(torch.arange(6) % 3))
    with pytest.raises(ModelError, match="MulticlassRecall gives"):
        metrics["multiclassrecall"].compute()
    collection = torchmetrics.MetricCollection([f1()])
    with pytest.raises(ModelError, match="several numbers") as caught:
        as_metrics([collection])
    assert "dict(collection)" in caught.value.do
    assert list(as_metrics(dict(collection))) == ["MulticlassF1Score"]


def test_names():
    assert list(as_metrics("accuracy")) == ["accuracy"]
    assert list(as_metrics({"mine": "mse"})) == ["mine"]
    assert as_metrics(()) == {}
    with pytest.raises(ModelError, match="unknown metric 'acc'; known: accuracy"):
        as_metrics(["acc"])
    with pytest.raises(ModelError, match="found int"):
        as_metrics([3])


def test_every_call_makes_fresh_metrics():
    first, second = as_metrics(["accuracy"]), as_metrics(["accuracy"])
    first["accuracy"].update(torch.ones(2, 1), batch(torch.ones(2)))
    assert math.isnan(second["accuracy"].compute())


@pytest.mark.parametrize("through_a_file", [False, True])
@pytest.mark.parametrize("kind", ["accuracy", "auc", "mae", "f1", "auroc", "squared"])
def test_going_on_from_a_state(kind, through_a_file):
    def make():
        own = {
            "f1": f1,
            "auroc": torchmetrics.classification.BinaryAUROC,
            "squared": torchmetrics.MeanSquaredError,  # adds in place
        }
        return as_metrics({"it": own[kind]() if kind in own else kind})["it"]

    def feed(metric, seed):
        scores = draw(10, 3, seed=seed) if kind == "f1" else draw(10, seed=seed)
        metric.update(scores, batch(torch.arange(10) % (3 if kind == "f1" else 2)))

    metric = make()
    feed(metric, 0)
    state = metric.state_dict()
    if through_a_file:
        state = unflatten(*flatten(state))
    before = metric.compute()
    feed(metric, 1)
    whole = metric.compute()
    for _ in range(2):  # what was loaded once can be loaded again
        other = make()
        other.load_state_dict(state)
        assert other.compute() == before
        feed(other, 1)
        assert other.compute() == whole
    metric.reset()
    feed(metric, 0)
    assert metric.compute() == before
