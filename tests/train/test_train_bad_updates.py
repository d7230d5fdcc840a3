"""An update that makes NaN or infinity from finite gradients is reported as the cause."""

import pytest
import torch
from torch import nn

import flatout
from flatout.errors import NumbersError
from flatout.kernels import table_rows
from flatout.recipe import Compute, Recipe


def data(dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(64, 6, generator=draw)
    x[:, 3] = 0  # so one column of weights has only gradients of 0
    return x.to(dtype), (x.sum(1) > 0).long()


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))


def message(model, optimizer, given=None, epochs=2):
    trainer = flatout.Trainer(model, optimizer=optimizer, say=lambda line: None)
    with pytest.raises(NumbersError) as caught:
        trainer.fit(given or data(), batch_size=32, epochs=epochs, verbose=0)
    return str(caught.value)


def no_eps(model):
    return torch.optim.Adam(model.parameters(), lr=1e-3, eps=0.0)


def state_with_nan(model):
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.state[model[2].weight]["exp_avg"][0, 0] = float("nan")
    return optimizer


def test_adam_without_eps_damages_weights_and_that_is_reported():
    model = network()
    words = message(model, no_eps(model))
    assert torch.isnan(model[0].weight).any()
    assert "update made NaN or infinity from finite gradients, in weight 0.weight\n" in words
    assert "step 1 or earlier" in words
    assert "eps=0 divides by zero" in words
    assert "take eps=1e-8" in words
    assert "the weights are damaged" in words
    assert "sample" not in words
    assert "before this step" not in words


def test_the_last_update_of_a_fit_is_checked_too():
    model = network()
    trainer = flatout.Trainer(model, optimizer=no_eps(model), say=lambda line: None)
    with pytest.raises(NumbersError, match=r"weight 0\.weight"):
        trainer.fit(data(), batch_size=64, epochs=1, verbose=0)  # the fit has one step


def test_half_precision_weights_name_their_type_and_the_advice_works():
    model = network().half()
    words = message(model, torch.optim.Adam(model.parameters()), data(torch.float16))
    assert "eps=1e-08 rounds to 0 in float16" in words
    assert "model.float()" in words
    model = network().half().float()
    history = flatout.Trainer(model, say=lambda line: None).fit(data(), epochs=1, verbose=0)
    assert history.epochs[0]["loss"] > 0


def test_nan_in_the_state_of_the_optimizer_is_named():
    model = network()
    words = message(model, state_with_nan(model))
    assert "the optimizer's state exp_avg of weight 2.weight holds NaN" in words
    assert "make the optimizer again" in words
    assert "learning rate" not in words


def test_a_huge_rate_names_the_weights_that_it_made_and_not_each_sample():
    model = network()
    words = message(model, torch.optim.SGD(model.parameters(), lr=1e38))
    assert "learning rate 1e+38" in words
    assert "has values as large as" in words
    assert "first bad value: output of module" in words
    finite = all(torch.isfinite(p).all() for p in model.parameters())
    assert ("the weights are those before this step" in words) == finite


def test_infinite_weights_of_a_huge_rate():
    model = network()
    model[2].bias.register_hook(lambda gradient: gradient * 1e10)
    words = message(model, torch.optim.SGD(model.parameters(), lr=1e38))
    assert "in weight 2.bias\n" in words
    assert "learning rate 1e+38" in words
    assert "take a lower learning rate" in words
    assert "the weights are damaged" in words


def test_weights_that_were_bad_before_training():
    model = network()
    with torch.no_grad():
        model[0].bias[2] = float("nan")
    words = message(model, torch.optim.Adam(model.parameters()))
    assert "NaN or infinity in weight 0.bias\n  before the first step" in words


def test_rows_that_no_later_step_reads_are_found_at_the_end_of_an_epoch():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows, self.out = nn.Embedding(9, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.out(self.rows(x).mean(1))

    torch.manual_seed(0)
    model, ids = Words(), torch.arange(8).repeat(8, 1)
    # Row 8 is never read: its gradient is 0, and with eps=0 Adam divides by 0.
    loop = flatout.Loop(say=lambda line: None)
    optimizer = torch.optim.Adam(model.rows.parameters(), eps=0.0)
    source = flatout.data.as_source((ids, torch.arange(8) % 2), batch_size=4)

    def compute(batch):
        return nn.functional.cross_entropy(model(batch.inputs), batch.targets)

    loop.prepare(model, optimizer, compute=compute, data=source)
    epochs = loop.epochs(1)
    next(epochs)
    for batch in loop.batches(source):
        loop.step(compute, batch)
    with pytest.raises(NumbersError, match=r"in weight rows\.weight") as caught:
        next(epochs)
    loop.close(caught.value)
    assert not torch.isfinite(model.rows.weight).all()


class LastRowMasked(nn.Module):
    """A model whose gradient of row 7 is 0, so that Adam with eps=0 divides by 0."""

    def __init__(self):
        super().__init__()
        self.rows, self.out = nn.Embedding(8, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.out(self.rows(x) * (x < 7)[:, None])


def by_rows(epochs):
    """Return a trainer of a table stepped by rows, and its fit of one step per epoch."""
    torch.manual_seed(0)
    model = LastRowMasked()
    trainer = flatout.Trainer(
        model,
        optimizer=torch.optim.Adam(model.parameters(), eps=0.0),
        recipe=Recipe(compute=Compute(touched_rows="on", precision="fp32")),
        say=lambda line: None,
    )
    given = torch.arange(8), torch.arange(8) % 2
    return trainer, lambda: trainer.fit(given, batch_size=8, epochs=epochs, verbose=0)


needs_kernel = pytest.mark.skipif(not table_rows.available(), reason="the C extension is absent")


@needs_kernel
def test_a_damaged_row_that_no_batch_reads_again_is_found_before_saving(tmp_path):
    trainer, fit = by_rows(epochs=1)
    fit()
    with pytest.raises(NumbersError, match=r"in weight rows\.weight"):
        trainer.save(tmp_path / "model.safetensors")


@needs_kernel
def test_a_damaged_row_is_found_by_the_batch_that_reads_it():
    _, fit = by_rows(epochs=2)
    with pytest.raises(NumbersError, match=r"in weight rows\.weight") as caught:
        fit()
    assert "step 1 or earlier" in str(caught.value)


def test_a_gradient_that_is_bad_still_leaves_the_weights_before_it():
    model = network()
    model[0].weight.register_hook(lambda gradient: gradient * float("inf"))
    words = message(model, no_eps(model))
    assert "the loss or a gradient is NaN or infinite" in words
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert "the weights are those before this step" in words
