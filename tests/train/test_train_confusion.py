"""The confusion matrix: counted over batches and ranks, told by class."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix, recall_score
from train_jobs import CLASSES, data, network

import flatout
from flatout.data.batches.batch import Batch
from flatout.errors import FlatoutError, ModelError
from flatout.train.losses.confusion import ConfusionCount, precision_of, table

sys.path.insert(0, str(Path(__file__).parents[1] / "world"))
from world_ranks import run

pytestmark = pytest.mark.usefixtures("one_thread")


def batch(targets):
    return Batch(torch.zeros(len(targets), 1), targets, None, None, len(targets))


def test_counts_are_scikit_learns_in_one_and_over_states():
    output, target = torch.randn(60, 4), torch.randint(0, 4, (60,))
    whole, one, other = ConfusionCount(), ConfusionCount(), ConfusionCount()
    whole.update(output, batch(target))
    one.update(output[:25], batch(target[:25]))
    other.update(output[25:], batch(torch.nn.functional.one_hot(target[25:], 4).float()))
    other.update(output[:5], batch(torch.full((5,), -100)))
    expected = confusion_matrix(target, output.argmax(1)).tolist()
    recall = recall_score(target, output.argmax(1), average="macro")
    assert whole.compute() == pytest.approx(recall)
    states = [one.state_dict(), other.state_dict(), None]
    assert ConfusionCount().compute(states) == whole.compute()
    whole.compute(states)
    assert whole.latest == expected
    assert np.isnan(ConfusionCount().compute())


def test_a_class_without_samples_has_no_recall():
    matrix = [[3, 1, 0], [0, 0, 0], [2, 0, 2]]
    lines = table(matrix, ["cat", "dog", "owl"]).splitlines()
    assert lines[1].split() == ["cat", "4", "75.0%", "60.0%", "dog", "(1)"]
    assert lines[2].split() == ["dog", "0", "-", "0.0%"]
    assert precision_of(matrix)[1:] == [0.0, 1.0]


def test_a_fit_keeps_tells_and_draws_it(tmp_path):
    x, y = data()
    lines = []
    trainer = flatout.Trainer(
        network(), metrics=["accuracy", "confusion"], run=tmp_path / "run", say=lines.append
    )
    history = trainer.fit((x, y), batch_size=32, epochs=2, validation_data=(x, y), progress=False)
    expected = confusion_matrix(y, trainer.predict(x).argmax(1), labels=range(CLASSES))
    assert history.confusion == expected.tolist()
    mean = np.mean(list(history.class_recall().values()))
    assert history.epochs[-1]["val_mean_recall"] == pytest.approx(mean)
    assert any(line.startswith("class") and "recall" in line for line in lines)
    kept = json.loads((tmp_path / "run" / "history.json").read_text())
    assert kept["confusion"] == expected.tolist()
    pytest.importorskip("matplotlib")
    history.plot_confusion(tmp_path / "confusion.png")
    assert (tmp_path / "confusion.png").stat().st_size > 1000


@pytest.mark.parametrize("one_hot", [False, True])
def test_a_compiled_keras_model_is_counted_beside_its_own_metrics(one_hot):
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "torch":
        pytest.skip("Keras runs on another backend")
    x, y = (value.numpy() for value in data())
    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense(CLASSES, activation="softmax")
    model = keras.Sequential([keras.Input(x.shape[1:]), dense])
    loss = "categorical_crossentropy" if one_hot else "sparse_categorical_crossentropy"
    model.compile("adam", loss, metrics=["accuracy"])
    targets = np.eye(CLASSES, dtype=np.float32)[y] if one_hot else y
    trainer = flatout.Trainer(model, metrics=["confusion"], say=lambda line: None)
    given = {"batch_size": 32, "epochs": 1, "progress": False}
    history = trainer.fit(x, targets, validation_data=(x, targets), **given)
    expected = confusion_matrix(y, trainer.predict(x).argmax(1), labels=range(CLASSES))
    assert history.confusion == expected.tolist()
    mean = np.mean(list(history.class_recall().values()))
    assert history.epochs[-1]["val_mean_recall"] == pytest.approx(mean)
    assert "val_accuracy" in history.epochs[-1]


def test_what_has_no_confusion():
    with pytest.raises(ModelError, match="one class a sample"):
        ConfusionCount().update(torch.zeros(3), batch(torch.zeros(3)))
    with pytest.raises(FlatoutError, match="no confusion matrix was recorded"):
        flatout.train.history.History(8).plot_confusion("a.png")


JOB = """
    import torch
    from torch import nn

    import flatout
    from flatout.world import join

    torch.manual_seed(0)
    x = torch.randn(65, 6)  # the last batch is one sample, which every rank has
    y = (x[:, :3] + 0.5 * torch.randn(65, 3)).argmax(1)
    trainer = flatout.Trainer(
        nn.Linear(6, 3), optimizer="sgd", lr=0.1, metrics=["confusion"], say=lambda line: None
    )
    history = trainer.fit(
        (x, y), batch_size=16, epochs=2, validation_data=(x, y), progress=False
    )
    assert trainer.evaluate((x, y))["mean_recall"] == history.epochs[-1]["val_mean_recall"]
    if join().is_first:
        print(history.confusion, history.epochs[-1]["val_mean_recall"])
"""


@pytest.mark.slow
def test_two_ranks_count_what_one_counts(tmp_path):
    alone, both = (run(JOB, ranks, tmp_path)[0][0] for ranks in (1, 2))
    assert alone == both
    counts = json.loads(alone[: alone.rindex("]") + 1])
    assert sum(map(sum, counts)) == 65
    assert len(counts) == 3
