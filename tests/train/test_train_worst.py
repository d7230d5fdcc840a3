"""Trainer.worst: the samples with the highest loss."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flatout
from flatout.errors import DataError, FlatoutError, ModelError


def trainer(model, loss="cross_entropy"):
    return flatout.Trainer(model, loss=loss, say=lambda line: None)


def test_those_with_the_highest_loss_come_first_each_with_its_own():
    torch.manual_seed(0)
    model, x, y = nn.Linear(5, 3), torch.randn(40, 5), torch.arange(40) % 3
    found = trainer(model).worst(x, y, n=7, batch_size=16)
    losses = F.cross_entropy(model(x), y, reduction="none").detach()
    expected = losses.argsort(descending=True)[:7]
    assert [one.number for one in found] == expected.tolist()
    shares = model(x).softmax(1).detach()
    for one in found:
        assert one.loss == pytest.approx(float(losses[one.number]), rel=1e-5)
        assert one.target == int(y[one.number])
        assert one.predicted == int(shares[one.number].argmax())
        assert one.probability == pytest.approx(float(shares[one.number].max()), rel=1e-5)
    assert found.as_dict()[0]["number"] == found[0].number
    assert repr(found).splitlines()[0].split() == ["loss", "target", "predicted", "sample"]
    assert len(trainer(model).worst(x, y, n=100)) == 40
    with pytest.raises(FlatoutError, match="no images"):
        found.plot("nowhere.png")


def test_values_and_losses_of_ones_own():
    torch.manual_seed(0)
    model, x, y = nn.Linear(4, 1), torch.randn(30, 4), torch.randn(30, 1)

    def own(output, target):
        return (output - target).abs().mean()

    by_name, by_own = trainer(model, "mae").worst(x, y, n=3), trainer(model, own).worst(x, y, n=3)
    assert [one.number for one in by_name] == [one.number for one in by_own]
    first = by_name[0]
    assert first.predicted - first.target == pytest.approx(
        float((model(x) - y).detach()[first.number]), rel=1e-4
    )
    assert first.probability is None


def test_a_loss_that_is_not_a_number_is_the_worst():
    model, x = nn.Linear(2, 2), torch.randn(6, 2)
    x[4] = float("nan")
    assert trainer(model).worst(x, torch.zeros(6, dtype=torch.int64), n=2)[0].number == 4


def test_images_are_named_and_drawn(tmp_path):
    pil = pytest.importorskip("PIL.Image")
    draw = np.random.default_rng(0)
    for name in ("cat", "dog"):
        folder = tmp_path / "photos" / name
        folder.mkdir(parents=True)
        for number in range(4):
            pixels = draw.integers(0, 255, (12, 12, 3), dtype=np.uint8)
            pil.fromarray(pixels).save(folder / f"{number}.png")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12 * 12 * 3, 2))
    images = flatout.data.images(tmp_path / "photos", size=12).batch(3)
    found = trainer(model).worst(images, n=6)
    assert {one.target for one in found} <= {"cat", "dog"}
    assert all(one.target in one.where for one in found)
    found.plot(tmp_path / "worst.png")
    assert (tmp_path / "worst.png").stat().st_size > 5000


COMPILED = {
    "sparse_categorical_crossentropy": ("softmax", 3, True),
    "categorical_crossentropy": ("softmax", 3, True),
    "binary_crossentropy": ("sigmoid", 1, True),
    "mse": (None, 1, False),
}


@pytest.mark.parametrize("loss", COMPILED)
def test_a_compiled_keras_model_is_judged_by_its_own_loss(loss):
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "torch":
        pytest.skip("Keras is on another backend")
    activation, outputs, has_classes = COMPILED[loss]
    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense(outputs, activation=activation)
    model = keras.Sequential([keras.Input((5,)), dense])
    model.compile("sgd", loss)
    draw = np.random.default_rng(0)
    x = draw.normal(size=(20, 5)).astype("float32")
    y = draw.integers(0, max(2, outputs), 20)
    if loss == "categorical_crossentropy":
        y = np.eye(outputs, dtype=np.float32)[y]
    found = flatout.Trainer(model, say=lambda line: None).worst(x, y, n=3, batch_size=8)
    alone = [model.evaluate(x[at : at + 1], y[at : at + 1], verbose=0) for at in range(20)]
    expected = np.argsort(alone)[::-1][:3]
    assert [one.number for one in found] == expected.tolist()
    assert [one.loss for one in found] == pytest.approx(np.sort(alone)[::-1][:3], rel=1e-4)
    assert all((one.probability is not None) is has_classes for one in found)
    if outputs > 1:
        scores = np.asarray(model.predict(x, verbose=0))[expected]
        assert [one.predicted for one in found] == scores.argmax(1).tolist()
        assert [one.probability for one in found] == pytest.approx(scores.max(1), rel=1e-4)


def test_what_cannot_be_is_said():
    with pytest.raises(DataError, match="no targets"):
        trainer(nn.Linear(2, 2)).worst(torch.randn(4, 2))
    two = flatout.Trainer(nn.Linear(2, 2), loss={"a": "mse", "b": "mse"}, say=lambda line: None)
    with pytest.raises(ModelError, match="by one loss"):
        two.worst(torch.randn(4, 2), torch.randn(4, 2))
