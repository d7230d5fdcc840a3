"""batch_size="auto": the largest batch of which a step fits in memory."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from train_jobs import data, network
from train_largest_batch import fit
from train_ranks import run_on_two_ranks

import flatout
from flatout.data import arrays
from flatout.errors import DataError, ModelError
from flatout.recipe import Memory, Recipe
from flatout.train.contained import MEMORY, TIME, Child
from flatout.train.largest_batch import LargestBatch, TriedStep, search

pytestmark = pytest.mark.usefixtures("one_thread")


# -- the search ------------------------------------------------------------------------------------


def of(most, *, fits=10**9, least=1, seconds=0.0):
    """The samples that are tried where so many fit and so many are needed."""

    def attempt(samples):
        why = MEMORY if samples > fits else "" if samples >= least else "ValueError: too few"
        return TriedStep(samples, why, seconds * samples)

    return search(attempt, most)


@pytest.mark.parametrize("fits", [1, 2, 3, 7, 16, 100, 1_000, 4_097])
def test_the_largest_is_found_to_a_sixteenth(fits):
    tried = of(10_000, fits=fits)
    best = max(one.samples for one in tried if not one.why)
    assert best <= fits <= best + max(1, best // 16)
    assert len(tried) <= 2 + 2 * 14


def test_the_data_are_a_bound():
    assert [one.samples for one in of(150)] == [2, 4, 8, 16, 32, 64, 128, 150]
    assert [one.samples for one in of(1)] == [1]


def test_some_losses_take_no_few_samples():
    tried = of(100, least=5)
    assert [one.samples for one in tried] == [2, 4, 8, 16, 32, 64, 100]
    assert not tried[-1].why
    assert [one.samples for one in of(4, least=5)] == [2, 4]


def test_nothing_fits():
    assert [(one.samples, one.why) for one in of(100, fits=0)] == [(2, MEMORY), (1, MEMORY)]


def test_steps_that_would_take_too_long_are_not_tried():
    assert [one.samples for one in of(10_000, seconds=1.0)] == [2, 4, 8, 16]


def test_what_is_said():
    tried = (TriedStep(2, "", 0.1), TriedStep(64, "", 12.0))
    words = LargestBatch(64, 1, 10**9, TIME, tried).words(
        torch.optim.SGD(nn.Linear(1, 1).parameters()), None
    )
    assert words.startswith(
        "batch 64: a step took 12s, and larger batches were not tried (2 trials, "
    )
    found = LargestBatch(32, 2, 10**9, MEMORY, (TriedStep(16, "", 0.1), TriedStep(17, MEMORY, 0.1)))
    assert found.words((), None) == (
        "batch 32 = 2 x 16: the most that fits in 1.0 GB of memory for each rank, 17 samples do "
        "not fit (2 trials, 0.2s); the default batch size"
    )


# -- the child -------------------------------------------------------------------------------------


def test_a_child_tells_what_it_found_and_changes_nothing_here():
    seen = []
    told = Child(lambda: seen.append(1) or {"pid": os.getppid()}).result(120)
    assert (told.value, told.why, told.is_told) == ({"pid": os.getpid()}, "", True)
    assert seen == []


def test_a_child_computes_on_several_threads():
    """Threads of OpenMP are not in a copy of a process that has computed."""
    torch.set_num_threads(2)  # the fixture puts it back
    a = torch.randn(400, 400)
    here = float((a @ a).sum())
    told = Child(lambda: float((a @ a).sum())).result(60)
    assert told.value == pytest.approx(here, rel=1e-4)


def test_a_child_that_fails_or_hangs():
    def fail():
        raise ValueError("no\nsecond line")

    assert Child(fail).result(120).why == "ValueError: no"
    assert Child(lambda: os._exit(3)).result(120).why == "ended with exit code 3"
    assert Child(lambda: time.sleep(60)).result(0.2).why == TIME


# -- a fit -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_memory_holds():
    """In its own process: what others have freed there would be taken again."""
    tests = Path(__file__).with_name("train_in_little_memory.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(tests)],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout
    assert "4 passed" in done.stdout


@pytest.mark.slow
def test_all_of_small_data():
    model = network()  # BatchNorm in training takes no single sample
    _, history, said = fit(model, x=data(samples=8))
    assert history.batch_size == 8
    assert any(line.startswith("batch 8: all of the data") for line in said)
    assert fit(network(), x=data(samples=40), drop_last=True)[1].batch_size == 40
    dataset = TensorDataset(*data(samples=8))
    assert fit(network(), x=dataset)[1].batch_size == 8
    assert fit(network(), x=arrays(*data(samples=8)).shuffle(seed=1))[1].batch_size == 8
    rule = flatout.LrRule("linear", 32)
    _, history, said = fit(network(), x=data(samples=8), lr_rule=rule)
    assert history.lr_scale.batch == 8
    assert any(line.endswith("your learning-rate rule follows it") for line in said)


def test_steps_that_fail_for_another_reason():
    with pytest.raises(ModelError, match="steps fail, on 2 to 20 samples: RuntimeError: mat1"):
        fit(nn.Linear(5, 3), x=data(samples=20))


def test_what_cannot_be_chosen(tmp_path):
    loader = DataLoader(TensorDataset(*data()), batch_size=8)
    for batches in (loader, arrays(*data()).batch(8), [data()]):
        with pytest.raises(DataError, match="makes its own") as caught:
            fit(network(), x=batches)
        assert "loader.dataset" in caught.value.do
    with pytest.raises(ModelError, match="micro_batch=8"):
        fit(network(), recipe=Recipe(memory=Memory(micro_batch=8)))


@pytest.mark.slow
def test_a_compiled_keras_model():
    keras = pytest.importorskip("keras")
    x, y = data(samples=20)
    model = keras.Sequential([keras.layers.Dense(3)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    said = []
    trainer = flatout.Trainer(model, say=said.append)
    history = trainer.fit(x.numpy(), y.numpy(), batch_size="auto", verbose=0)
    assert history.batch_size == 20
    assert any("LrRule('sqrt', 32) would take a learning rate of 0.0007906" in one for one in said)


TWO = """
    import torch
    from torch import nn
    import flatout
    from flatout.train import largest_batch

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(12, 3)

        def forward(self, x):
            outputs = self.inner(x)
            wide = outputs.mean(1, keepdim=True).expand(-1, 250_000).exp()
            return outputs + wide.mean(1, keepdim=True)

    # Each rank has half of it.
    free = {"0": 160_000_000, "1": 100_000_000}
    import os
    largest_batch.available_bytes = lambda: free[os.environ["RANK"]]
    torch.manual_seed(0)
    x, y = torch.randn(400, 12), torch.arange(400) % 3
    history = flatout.Trainer(Wide(), allow="exact").fit((x, y), batch_size="auto", progress=False)
    own = max(one["samples"] for one in history.largest_batch["tried"] if not one["why"])
    line = f"found {history.batch_size} {own} {history.largest_batch['ranks']}\\n"
    print(line, end="", flush=True)
"""


@pytest.mark.slow
def test_ranks_take_what_fits_on_all(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(TWO))
    done = run_on_two_ranks(tmp_path)
    assert done.returncode == 0, done.stderr
    found = [
        line.split("found ")[1].split() for line in done.stdout.splitlines() if "found" in line
    ]
    sizes = {int(size) for size, _, _ in found}
    own = [int(size) for _, size, _ in found]
    assert len(sizes) == 1
    assert sizes == {2 * min(own)}
    assert {ranks for _, _, ranks in found} == {"2"}
