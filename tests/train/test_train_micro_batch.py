import itertools
import subprocess
import sys
import textwrap
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from train_jobs import ALWAYS_TUNED, close, data, figures, trainer

import flatout
from flatout.data.batches.batch import Batch
from flatout.errors import OutOfMemory
from flatout.recipe import Memory, Recipe
from flatout.train import micro_batch
from flatout.train.micro_batch import estimate_pieces, is_out_of_memory, pieces_for, smaller
from flatout.train.terms import TERMS, Terms


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate"),
        RuntimeError("std::bad_alloc"),
        RuntimeError("not enough memory: you tried to allocate 4GB"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_errors_that_say_so(error):
    assert is_out_of_memory(error)


def test_a_real_error_of_the_cpu_allocator():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shape mismatch"),
        ValueError("DefaultCPUAllocator"),
        OutOfMemory("no further"),
        KeyboardInterrupt(),
    ],
)
def test_errors_that_do_not(error):
    assert not is_out_of_memory(error)


def test_twice_as_many_until_each_sample_is_alone():
    model, pieces, seen = nn.Linear(1, 1), 1, []
    while pieces < 11:
        pieces = smaller(model, pieces, 11, "step 1")
        seen.append(pieces)
    assert seen == [2, 4, 8, 11]
    with pytest.raises(OutOfMemory, match="single sample") as caught:
        smaller(model, 11, 11, "step 5")
    assert caught.value.where == "step 5, batch of 11 in 11 micro-batches"


def test_batch_norm_in_training_is_not_split():
    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    with pytest.raises(OutOfMemory, match="BatchNorm") as caught:
        smaller(model, 1, 64, "step 5")
    assert "Memory(micro_batch=32)" in caught.value.do
    assert smaller(model.eval(), 1, 64, "step 5") == 2


@pytest.mark.parametrize(
    ("size", "asked", "pieces"), [(10, "auto", 1), (10, "whole", 1), (10, 3, 4), (10, 10, 1)]
)
def test_pieces_that_were_asked_for(size, asked, pieces):
    assert pieces_for(size, asked) == pieces


# -- the estimate ----------------------------------------------------------------------------------


def convnet():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(16 * 16 * 16, 10),
    )


def of(model, size=64, free=10**12, monkeypatch=None):
    x = torch.randn(size, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    batch = Batch(x, torch.arange(size) % 10, None, None, size)
    monkeypatch.setattr(micro_batch, "available_bytes", lambda: free)
    return estimate_pieces(model, lambda b: F.cross_entropy(model(b.inputs), b.targets), batch)


def test_more_pieces_where_less_is_free(monkeypatch):
    model = convnet()
    found = [of(model, 64, free, monkeypatch) for free in (10**12, 10**8, 2 * 10**7, 10**6, 0)]
    assert found[0] == 1
    assert found == sorted(found)
    assert 1 < found[2] < 64
    assert found[-1] == 64


def test_the_estimate_leaves_no_trace(monkeypatch):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))
            self.calls = 0

        def forward(self, x):
            self.count += 1
            self.calls += 1
            return x

    model = nn.Sequential(Counts(), *convnet())
    random = torch.get_rng_state()
    of(model, monkeypatch=monkeypatch)
    assert model[0].count == 0
    assert model[0].calls == 0
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in model.parameters())


def test_where_there_is_nothing_to_estimate(monkeypatch):
    assert of(convnet(), 3, 0, monkeypatch) == 1
    assert of(nn.Sequential(nn.BatchNorm2d(3), *convnet()), 64, 0, monkeypatch) == 1

    class Broken(nn.Module):
        def forward(self, x):
            raise ValueError

    assert of(Broken(), 64, 0, monkeypatch) == 1


MODELS = {
    "a ConvNet": """
        model = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(),
            nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Flatten(),
            nn.Linear(64 * 16 * 16, 10))
        x = torch.randn(192, 3, 32, 32)
    """,
    "a transformer": """
        layer = nn.TransformerEncoderLayer(96, 4, 192, batch_first=True, dropout=0.1)
        encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        model = nn.Sequential(encoder, nn.Flatten(), nn.Linear(96 * 64, 10))
        x = torch.randn(128, 64, 96)
    """,
    "an MLP": """
        model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(),
                              nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10))
        x = torch.randn(8192, 256)
    """,
}
MEASURE = """
    import torch, torch.nn.functional as F
    from torch import nn
    from flatout.data.batches.batch import Batch
    from flatout.train import micro_batch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    {model}
    batch = Batch(x, torch.arange(len(x)) % 10, None, None, len(x))

    def forward(b):
        return F.cross_entropy(model(b.inputs), b.targets)

    def bytes_of(name):
        with open("/proc/self/status") as file:
            line = next(line for line in file if line.startswith(name))
        return int(line.split()[1]) * 1024

    forward(Batch(x[:2], batch.targets[:2], None, None, 2)).backward()
    model.zero_grad()
    # The least free memory at which the batch is not split is what the estimate says it needs.
    low, high = 0, 2**36
    while high - low > 2**20:
        middle = (low + high) // 2
        micro_batch.available_bytes = lambda: middle
        if micro_batch.estimate_pieces(model, forward, batch) == 1:
            high = middle
        else:
            low = middle
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the highest mark of resident memory starts over
    before = bytes_of("VmRSS")
    forward(batch).backward()
    print(high, bytes_of("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_estimate_is_about_what_a_step_takes(name):
    model = textwrap.indent(textwrap.dedent(MODELS[name]), "    ").strip()
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEASURE.format(model=model))],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    estimate, taken = map(int, done.stdout.split())
    # Never lets through what does not fit; and does not split what fits three times over.
    assert taken < estimate < 4 * taken


# -- one forward pass that does not fit ------------------------------------------------------------


class Hungry(nn.Module):
    """Runs out of memory on more than eight rows."""

    def forward(self, x):
        if len(x) > 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return x


def fitted(*layers, micro_batch="auto", terms=TERMS, **options):
    torch.manual_seed(0)
    model = nn.Sequential(*layers, nn.Linear(12, 3))
    said = []
    recipe = Recipe(memory=Memory(micro_batch=micro_batch))
    trainer = flatout.Trainer(
        model, recipe=recipe, say=said.append, optimizer=torch.optim.SGD, metrics=["accuracy"]
    )
    trainer.terms = terms
    history = trainer.fit(
        data(), batch_size=32, epochs=2, validation_data=data(), progress=False, **options
    )
    return trainer, history, said


@pytest.mark.parametrize("worth_s", [1e9, 0.0])
@pytest.mark.parametrize("micro_batch", ["auto", 8])
def test_a_forward_pass_that_does_not_fit_runs_in_pieces(micro_batch, worth_s):
    # Whether a few samples of an evaluation are looked at, too.
    terms = Terms(worth_s=worth_s)
    trainer, history, said = fitted(Hungry(), micro_batch=micro_batch, terms=terms)
    plain, expected, _ = fitted(nn.Identity())
    assert close(trainer.model, plain.model)
    for ours, theirs in zip(figures(history), figures(expected), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
    noted = [
        f"before the first step: memory ran out; the batch now runs in {n} micro-batches"
        for n in (2, 4)
    ]
    assert history.notes == (noted if micro_batch == "auto" else [])
    out = "memory ran out in the evaluation of"
    # Found out by the look before the first step, at a batch of the training.
    assert [line for line in said if out in line] == [
        f"{out} {n} samples: it goes on with {n // 2} at a time" for n in (32, 16)
    ]
    x, _ = data()
    torch.testing.assert_close(trainer.predict(x), plain.predict(x))
    torch.testing.assert_close(trainer.evaluate(data()), plain.evaluate(data()))


def test_a_forward_pass_that_cannot_be_split():
    with pytest.raises(OutOfMemory, match="BatchNorm forbids splitting") as caught:
        fitted(Hungry(), nn.BatchNorm1d(12))
    assert caught.value.where == "before the first step, batch of 32 in 1 micro-batch"
    with pytest.raises(OutOfMemory, match="memory ran out") as caught:
        fitted(Hungry(), micro_batch="whole")
    assert "micro_batch='auto'" in caught.value.do


def test_a_single_sample_that_cannot_be_evaluated():
    model = nn.Sequential(nn.Linear(12, 3))

    class Starved(nn.Module):
        def forward(self, x):
            raise MemoryError

    model.append(Starved())
    with pytest.raises(OutOfMemory, match="the evaluation of a single sample"):
        trainer(model).evaluate(data())


def test_no_memory_to_measure_other_settings():
    class Starved(nn.Module):
        """A model whose pass over the few checked samples finds no memory."""

        def forward(self, x):
            if len(x) < 8 and torch.is_grad_enabled():
                raise MemoryError
            return x

    ticks = partial(next, itertools.count(step=1e-3))  # a clock that does not depend on the machine
    _, history, said = fitted(Starved(), terms=replace(ALWAYS_TUNED, fewest_steps=1, clock=ticks))
    assert len(history.epochs) == 2
    assert any("memory does not suffice to try other settings" in line for line in said)


LIMITED = """
    import resource, torch
    from torch import nn
    import flatout
    from flatout.recipe import Memory, Recipe

    torch.set_num_threads(1)
    size = 8_000
    x = torch.randn(size, 16, generator=torch.Generator().manual_seed(1))
    y = torch.arange(size) % 4
    said = []

    def limit(extra):
        with open("/proc/self/statm") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (-1 if extra is None else now + extra, -1))

    def run(micro_batch, extra):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 8192), nn.Tanh(), nn.Linear(8192, 4))
        trainer = flatout.Trainer(
            model, optimizer=torch.optim.SGD, lr=0.1, say=said.append,
            recipe=Recipe(memory=Memory(micro_batch=micro_batch)))
        trainer.fit(x[:64], y[:64], progress=False)  # what is allocated once is allocated now
        limit(extra)
        trainer.fit(x, y, batch_size=size, progress=False)
        figures = trainer.evaluate(x, y, batch_size=size)
        outputs = trainer.predict(x, batch_size=size)
        limit(None)
        return outputs, figures["loss"], *model.parameters()

    wanted = run("whole", None)
    assert not any("memory ran out" in line for line in said)
    for micro_batch in ("auto", 500):
        said.clear()
        for a, b in zip(run(micro_batch, 300_000_000), wanted):
            torch.testing.assert_close(a, b)
        assert any("memory ran out in the evaluation" in line for line in said), said
"""


@pytest.mark.slow
def test_a_forward_pass_that_really_does_not_fit():
    """Under a limit on the address space; a forward of all samples takes twice of that."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LIMITED)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
