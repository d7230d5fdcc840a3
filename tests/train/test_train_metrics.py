"""Metrics against numpy and scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torchmetrics.classification import MulticlassF1Score

from flatout.data.batch import Batch
from flatout.errors import ModelError
from flatout.train.metrics import accuracy, as_metrics


def batch_of(targets):
    return Batch(targets, targets, None, None, len(targets))


def fed(metric, outputs, targets, sizes):
    start = 0
    for size in sizes:
        metric.update(outputs[start : start + size], batch_of(targets[start : start + size]))
        start += size
    return metric.compute()


def test_accuracy_counts_samples_whatever_the_batches():
    outputs, targets = torch.randn(100, 7), torch.randint(0, 7, (100,))
    expected = float((outputs.argmax(1) == targets).double().mean())
    for sizes in ([100], [64, 36], [1] * 100):
        (metric,) = as_metrics(["accuracy"]).values()
        assert fed(metric, outputs, targets, sizes) == pytest.approx(expected, abs=1e-7)


def share(output, target):
    right, counted = accuracy(output, target)
    return float(right) / float(counted)


def test_accuracy_of_logits_pixels_and_probabilities():
    logits, truth = torch.randn(50, 1), torch.randint(0, 2, (50,))
    expected = ((logits[:, 0] > 0) == (truth == 1)).double().mean()
    assert share(logits, truth) == pytest.approx(float(expected))
    pixels, labels = torch.randn(4, 3, 5, 5), torch.randint(0, 3, (4, 5, 5))
    expected = (pixels.argmax(1) == labels).double().mean()
    assert share(pixels, labels) == pytest.approx(float(expected))
    scores, soft = torch.randn(20, 3), torch.rand(20, 3)
    expected = (scores.argmax(1) == soft.argmax(1)).double().mean()
    assert share(scores, soft) == pytest.approx(float(expected))


def test_auc_is_scikit_learns():
    scores, truth = torch.randn(200), torch.randint(0, 2, (200,))
    (metric,) = as_metrics(["auc"]).values()
    found = fed(metric, scores, truth, [80, 120])
    assert found == pytest.approx(roc_auc_score(truth.numpy(), scores.numpy()), abs=1e-6)


def test_torchmetrics_and_callables_are_metrics():
    f1 = MulticlassF1Score(num_classes=3, average="macro")
    metrics = as_metrics({"f1": f1, "error": lambda o, t: (o.argmax(1) != t).float().mean()})
    outputs, targets = torch.randn(40, 3), torch.randint(0, 3, (40,))
    f1.update(outputs, targets)
    assert fed(metrics["f1"], outputs, targets, [15, 25]) == pytest.approx(float(f1.compute()))
    wrong = float((outputs.argmax(1) != targets).float().mean())
    assert fed(metrics["error"], outputs, targets, [15, 25]) == pytest.approx(wrong)


@pytest.mark.parametrize("given", ["accuracy", "auc"])
def test_a_checkpoint_in_the_middle_goes_on(given):
    scores, truth = torch.randn(60), torch.randint(0, 2, (60,))
    (whole,) = as_metrics([given]).values()
    expected = fed(whole, scores, truth, [20, 20, 20])
    (first,) = as_metrics([given]).values()
    fed(first, scores[:20], truth[:20], [20])
    (second,) = as_metrics([given]).values()
    second.load_state_dict(first.state_dict())
    assert fed(second, scores[20:], truth[20:], [20, 20]) == pytest.approx(expected, abs=1e-12)


def test_reset_forgets():
    (metric,) = as_metrics(["accuracy"]).values()
    fed(metric, torch.eye(4), torch.tensor([0, 1, 2, 3]), [4])
    metric.reset()
    assert np.isnan(metric.compute())
    assert fed(metric, torch.eye(4), torch.tensor([1, 1, 1, 1]), [4]) == pytest.approx(0.25)


def test_each_fit_gets_metrics_of_its_own():
    shared = MulticlassF1Score(num_classes=3)
    (metric,) = as_metrics([shared]).values()
    fed(metric, torch.randn(9, 3), torch.randint(0, 3, (9,)), [9])
    assert shared._update_count == 0


@pytest.mark.parametrize("given", [["acc"], [3]])
def test_what_is_no_metric_is_refused(given):
    with pytest.raises(ModelError, match="metric"):
        as_metrics(given)
