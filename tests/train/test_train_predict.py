"""predict: a row per sample, in order, whatever the batches and the form of the output."""

from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from train_jobs import CLASSES, SAMPLES, data, network, trainer

import flatout
from flatout.errors import DataError, ModelError

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("batch_size", [1, 7, SAMPLES, SAMPLES + 1, None])
def test_rows_come_in_the_order_of_the_samples(batch_size):
    x, _ = data()
    model = network()
    found = trainer(model).predict(x, batch_size=batch_size)
    model.eval()
    with torch.no_grad():
        expected = model(x)
    assert found.shape == (SAMPLES, CLASSES)
    assert torch.allclose(found, expected, atol=1e-6)
    assert not found.requires_grad
    assert model.train()[3].training


@pytest.mark.parametrize(
    "form",
    [
        lambda x, y: x.numpy(),
        lambda x, y: TensorDataset(x, y),
        lambda x, y: TensorDataset(x),
        lambda x, y: DataLoader(TensorDataset(x, y), batch_size=40),
        lambda x, y: flatout.data.Arrays(x, y),
        lambda x, y: iter([x[:100], x[100:]]),
    ],
)
def test_every_kind_of_input(form):
    x, y = data()
    job = trainer(network())
    assert torch.allclose(job.predict(form(x, y)), job.predict(x), atol=1e-6)


class Many(nn.Module):
    """Returns what it is told to."""

    def __init__(self, form):
        super().__init__()
        self.inner, self.form = nn.Linear(12, CLASSES), form

    def forward(self, x):
        return self.form(self.inner(x))


def test_tuples_and_dicts_of_outputs():
    x, _ = data()

    def form(out):
        return OrderedDict(scores=out, parts=(out[:, 0], [out.argmax(1), None]))

    found = trainer(Many(form)).predict(x, batch_size=40)
    assert type(found) is dict
    first, (best, nothing) = found["parts"]
    assert torch.equal(first, found["scores"][:, 0])
    assert torch.equal(best, found["scores"].argmax(1))
    assert best.dtype == torch.int64
    assert nothing is None


def test_outputs_are_copies():
    """A view would keep the whole activation that it is a view of, for every batch."""
    x, _ = data()
    kept = torch.empty(SAMPLES, 12)

    class Reuses(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return torch.mul(x, self.weight.detach(), out=kept[: len(x)])[:, :3]

    assert torch.equal(trainer(Reuses()).predict(x, batch_size=40), x[:, :3])


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (lambda out: out.mean(), r"tensor of shape \(\) for 40 samples"),
        (lambda out: {"loss": out, "gram": out.T @ out}, r"shape \(3, 3\) for 40 samples"),
        (lambda out: 3, "returns a int, where a tensor is expected"),
        (lambda out: (out, "text"), "returns a str, where a tensor is expected"),
    ],
)
def test_what_has_no_row_per_sample_is_named(form, words):
    with pytest.raises(ModelError, match=words):
        trainer(Many(form)).predict(data()[0], batch_size=40)


def test_half_precision_comes_back_as_float32():
    model = network().to(torch.bfloat16)
    found = trainer(model).predict(data()[0].to(torch.bfloat16))
    assert found.dtype == torch.float32


def test_data_of_a_wrong_shape_are_explained_as_in_a_fit():
    x, y = data()
    job = trainer(network())
    wide = torch.cat([x, x], 1)
    runs = [
        lambda: job.predict(wide),
        lambda: job.evaluate(wide, y),
        lambda: job.fit(wide, y, progress=False),
    ]
    for run in runs:
        with pytest.raises(DataError, match="the model and loss do not take this batch") as caught:
            run()
        assert caught.value.where.startswith("batch: inputs float32 (")
        assert "first layer" in caught.value.where


def test_outputs_of_unlike_lengths_are_named_and_padding_cures_them():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
    trainer = flatout.Trainer(model, loss="cross_entropy", say=lambda line: None)
    texts = [torch.ones(2, 5, dtype=torch.long), torch.ones(2, 7, dtype=torch.long)]
    with pytest.raises(ModelError, match=r"\(5, 9\) in the first batch and \(7, 9\)"):
        trainer.predict(iter(texts))
    padded = [nn.functional.pad(text, (0, 7 - text.shape[1])) for text in texts]
    assert trainer.predict(iter(padded)).shape == (4, 7, 9)


def test_within_an_open_autocast_it_uses_the_weights_of_now():
    model = nn.Linear(4, 1)
    trainer = flatout.Trainer(model, loss="mse", say=lambda line: None)
    rows = torch.ones(8, 4)
    with torch.autocast("cpu", torch.bfloat16):
        before = trainer.predict(rows)
        with torch.no_grad():
            model.weight.add_(1.0)
        after = trainer.predict(rows)
    assert (after - before).float().mean().item() == pytest.approx(4.0, abs=0.1)
