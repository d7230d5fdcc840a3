"""The mushrooms of UCI, from text, TFRecord and row cache: the same weights from all."""

from pathlib import Path

import numpy as np
import pytest
import torch

import flatout
from flatout.data.reading.buffers import Buffers
from flatout.kernels import example
from plain_recipe import PLAIN

FOLDER = Path(__file__).parents[3] / "shared" / "data" / "agaricus"

pytestmark = pytest.mark.skipif(
    not FOLDER.is_dir(), reason="agaricus is absent: ../shared/data is not beside the project"
)


def fit(train, test):
    torch.manual_seed(0)
    width = train.schema["features"].shape[0]
    model = torch.nn.Sequential(torch.nn.Linear(width, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    trainer = flatout.Trainer(model, lr=0.01, metrics=["accuracy"], recipe=PLAIN)
    trainer.fit(train.shuffle(seed=1).batch(64), epochs=5, progress=False)
    accuracy = trainer.evaluate(test.batch(512))["accuracy"]
    return accuracy, [parameter.detach().clone() for parameter in model.parameters()]


def test_text_tfrecord_and_row_cache_train_to_the_same_weights(tmp_path):
    text = flatout.data.libsvm(FOLDER / "agaricus_train.libsvm")
    test = flatout.data.libsvm(FOLDER / "agaricus_test.libsvm", schema=text.schema)
    assert (text.batch(1).samples, test.batch(1).samples) == (6513, 1611)
    everything = text.origin.take(np.arange(6513), Buffers())
    content, _ = example.encode(dict(everything.columns))
    (tmp_path / "train.tfrecord").write_bytes(content)
    records = flatout.data.tfrecord(tmp_path / "train.tfrecord")
    rows = text.cache("disk", folder=str(tmp_path / "rows"))
    for _ in rows.batch(512).batches(0):
        pass  # fills the cache: training reads it
    (accuracy, weights), *others = (fit(train, test) for train in (text, records, rows))
    assert accuracy == 1.0
    for other_accuracy, other_weights in others:
        assert other_accuracy == 1.0
        assert all(map(torch.equal, weights, other_weights))
