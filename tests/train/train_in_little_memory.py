"""What a batch is where little memory is said to be free; test_train_largest_batch.py runs it."""

import pytest
import torch
from train_jobs import data, quiet
from train_largest_batch import Wide, fit

import flatout
from flatout.errors import OutOfMemory
from flatout.measure import Profile
from flatout.train import largest_batch
from flatout.train.contained import MEMORY, Child

pytestmark = pytest.mark.usefixtures("one_thread")


def test_what_a_child_may_not_take_is_no_ones_loss():
    assert Child(lambda: torch.ones(30_000_000).sum().item(), 60_000_000).result(120).why == MEMORY
    assert Child(lambda: torch.ones(30_000_000).sum().item(), 300_000_000).result(120).value == 3e7


def test_the_batch_is_what_memory_holds_and_nothing_else_changes(monkeypatch, tmp_path):
    torch.manual_seed(0)
    model, plain = Wide(), Wide()
    plain.load_state_dict(model.state_dict())
    random = torch.get_rng_state()
    free = 60_000_000
    _trainer, history, said = fit(model, monkeypatch, free, run=tmp_path / "run")
    size = history.batch_size
    # A megabyte of each sample for exp, and as much for its gradient.
    assert 20 <= size <= 34
    found = history.largest_batch
    assert found["batch_size"] == size
    assert found["limit_bytes"] == int(0.9 * free)
    assert found["bound"] == MEMORY
    assert {one["why"] for one in found["tried"]} == {"", MEMORY}
    (line,) = [one for one in said if one.startswith("batch ")]
    assert f"batch {size}: the most that fits in 54.0 MB of memory" in line
    rate = 0.1 * size / 32
    assert "changes what is learned: LrRule('linear', 32) would take a learning rate of" in line
    assert line.endswith(f"of {rate:.4g}, not applied: it stays 0.1")
    assert history.notes[0] == line
    assert Profile.read(tmp_path / "run").data["largest_batch"] == found
    torch.set_rng_state(random)
    expected = flatout.Trainer(
        plain, optimizer=torch.optim.SGD, lr=0.1, say=quiet, allow="exact"
    ).fit(data(), batch_size=size, progress=False)
    assert history.epochs[0]["loss"] == expected.epochs[0]["loss"]
    assert torch.equal(model.inner.weight, plain.inner.weight)


def test_a_run_that_goes_on_keeps_its_batch(monkeypatch, tmp_path):
    run = tmp_path / "run"
    _, first, _ = fit(Wide(), monkeypatch, 60_000_000, run=run)
    _, again, said = fit(Wide(), monkeypatch, 90_000_000, run=run, epochs=2, resume=True)
    assert again.batch_size == first.batch_size
    assert any(f"batch {first.batch_size}, the batch size saved in" in line for line in said)
    assert len(again.epochs) == 2


def test_not_even_one_sample(monkeypatch):
    monkeypatch.setattr(largest_batch, "available_bytes", lambda: 1_000_000)
    with pytest.raises(OutOfMemory, match="not even a step on 1 sample") as caught:
        fit(Wide(60_000_000))  # more than other tests may have left free in this process
    assert "fits in 0.9 MB" in caught.value.what
    assert "of weights" in caught.value.what
    assert "smaller model" in caught.value.do
