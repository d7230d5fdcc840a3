"""Arrays that are copied to the device: the same batches, and memory that is given back."""

import gc

import pytest
import torch
from torch import nn

import flatout
from flatout.data.source import as_source
from flatout.recipe import Choice, Parity
from flatout.train import decide, device_data, loop
from flatout.train.device_data import DeviceData

CPU = torch.device("cpu")


@pytest.fixture
def copies(monkeypatch):
    """As on a GPU, with the CPU in its place: the bytes of the arrays that are copied."""
    made: list[int] = []
    on = device_data.ArraySource.on
    monkeypatch.setattr(
        device_data.ArraySource, "on", lambda self, d: made.append(self.data.nbytes) or on(self, d)
    )
    chosen = Choice(value="on", reason="here", parity=Parity.EXACT)
    monkeypatch.setattr(decide.device_data, "choose", lambda *given, **facts: chosen)
    monkeypatch.setattr(loop, "room", lambda device: 10**9)
    return made


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3))


def arrays(kind: str):
    torch.manual_seed(1)
    images, classes = torch.randint(0, 256, (50, 12), dtype=torch.uint8), torch.arange(50) % 3
    if kind == "scaled":
        return flatout.data.arrays(images, classes, scale=1 / 255, shift=-0.5)
    if kind == "weighted":
        return images.float() / 255, classes, torch.rand(50)
    if kind == "pipeline":
        return flatout.data.arrays(images.float() / 255, classes).shuffle(seed=3).batch(16)
    return flatout.data.arrays(images.float() / 255, classes).map(lambda x, y: (x, y)).batch(16)


def trained(kind: str, on_device: str) -> tuple[nn.Module, flatout.History]:
    recipe = flatout.Recipe(input={"on_device": on_device}, compute={"precision": "fp32"})
    trainer = flatout.Trainer(network(), loss="cross_entropy", recipe=recipe, allow="exact")
    options = {} if kind in ("pipeline", "made") else {"batch_size": 16}
    validation = arrays("weighted")[:2]
    history = trainer.fit(
        arrays(kind), epochs=3, validation_data=validation, progress=False, **options
    )
    return trainer.model, history


@pytest.mark.parametrize("kind", ["scaled", "weighted", "pipeline"])
def test_the_result_is_the_same(kind, copies):
    plain, _ = trained(kind, "off")
    assert not copies
    model, history = trained(kind, "auto")
    assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))
    assert history.recipe.input.on_device == "on"
    # The training data at once, those of the validation when they came again.
    assert len(copies) == 2


def test_what_is_made_sample_by_sample_stays(copies):
    trained("made", "auto")
    assert len(copies) == 1  # of the validation


@pytest.mark.slow
def test_a_source_that_is_evaluated_once_is_not_copied():
    data = DeviceData(CPU, room=10**6)
    source = as_source((torch.zeros(10, 4), torch.zeros(10)), batch_size=5, shuffle=False)
    assert data.evaluated(source) is source
    copied = data.evaluated(source)
    assert copied is not source
    assert data.evaluated(source) is copied
    large = as_source((torch.zeros(10**6, 4), torch.zeros(10**6)), batch_size=5)
    assert data.evaluated(large) is data.evaluated(large) is large
    del source
    gc.collect()
    assert not len(data._copies)


def test_what_is_written_into_the_arrays_is_seen_by_the_next_epoch():
    data, x = DeviceData(CPU, room=10**6), torch.zeros(10, 4)
    source = as_source((x,), batch_size=5, shuffle=False)
    before = data.trained_on(source)
    for batch in before.batches(0):
        batch.inputs.add_(1)  # as a model may that works in place
    assert not x.any()
    assert data.trained_on(source) is before
    x[3] = 7
    assert data.trained_on(source) is not before


def test_data_that_do_not_fit_stay_and_are_named(monkeypatch):
    def on(self, device):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(device_data.ArraySource, "on", on)
    data = DeviceData(CPU, room=10**6)
    source = as_source((torch.zeros(1000, 4), torch.zeros(1000)), batch_size=5)
    assert data.trained_on(source) is data.trained_on(source) is source
    assert data.notes == ["the data stay on the host: 20.0 kB more do not fit on cpu"]


def test_what_decides(monkeypatch):
    gpu = torch.device("cuda", 0)
    cuda, allowed = device_data.torch.cuda, [1.0]
    monkeypatch.setattr(cuda, "mem_get_info", lambda device: (4_000, 40_000))
    monkeypatch.setattr(cuda, "memory_reserved", lambda device: 1_000)
    monkeypatch.setattr(cuda, "get_per_process_memory_fraction", lambda device: allowed[0])

    def chosen(asked, samples=1, device=gpu, frozen=False, source=None):
        source = source or as_source((torch.zeros(samples, 125),), batch_size=1)
        return device_data.choose(asked, source, device, frozen=frozen)

    assert chosen("auto", 2).value == "on"
    too_large = chosen("auto", 3)
    assert too_large.value == "off"
    assert (
        too_large.reason
        == "the data take 1.5 kB, but at most 1.0 kB of the device's memory is used for data"
    )
    assert chosen("on", 3).value == "on"
    assert chosen("on", device=CPU).reason == "no GPU"
    assert chosen("on", frozen=True).value == "off"
    assert chosen("on", source=arrays("made")).value == "off"
    allowed[0] = 0.1  # of 40 kB, of which 1 kB is taken
    assert chosen("auto", 2).reason.endswith(
        "at most 750 bytes of the device's memory is used for data"
    )
    assert chosen("auto", 1).value == "on"
