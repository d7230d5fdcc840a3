"""What is read of a process and of what it saves: OpenMP, compilations, contents of files."""

import math
import os
import sys
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flatout.observe.compiles import Compiles
from flatout.observe.gpus import memory_mb
from flatout.observe.loaders import MadeAt, SeenLoader
from flatout.observe.model_facts import some_of
from flatout.observe.observation import Site
from flatout.observe.openmp import libraries, settings
from flatout.observe.outputs import contents_of
from flatout.observe.round_trips import RoundTrips
from flatout.observe.tensors import copying, watch_tensors
from flatout.observe.watch import Watch

MAPS = """\
7f0 r-xp 00000000 08:01 1 /usr/lib/libgomp.so.1.0.0
7f1 r--p 00000000 08:01 1 /usr/lib/libgomp.so.1.0.0
7f2 r-xp 00000000 08:01 2 /a/torch/lib/libgomp-a34b3233.so.1
7f3 r-xp 00000000 08:01 3 /a folder/libiomp5.so
7f4 r-xp 00000000 08:01 4 /usr/lib/libompi.so.40
7f5 rw-p 00000000 00:00 0 [heap]
"""


def test_openmp_libraries_are_found_by_their_files(tmp_path):
    maps = tmp_path / "maps"
    maps.write_text(MAPS)
    assert libraries(maps) == ["libgomp-a34b3233.so.1", "libgomp.so.1.0.0", "libiomp5.so"]
    assert libraries(tmp_path / "none") is None
    assert any(name.startswith(("libgomp", "libiomp5", "libomp")) for name in libraries())


def test_settings_of_openmp_are_those_that_it_reads(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("OMP_", "KMP_", "GOMP_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("KMP_BLOCKTIME", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("COMP_NOTHING", "3")
    assert settings() == {"KMP_BLOCKTIME": "1", "OMP_NUM_THREADS": "2"}


def test_contents_are_equal_where_the_tensors_are():
    torch.manual_seed(0)
    model = nn.Linear(40, 70)
    state = {"epoch": 3, "model": model.state_dict(), "more": [torch.arange(3)]}
    number = contents_of(state)
    assert number is not None
    assert contents_of({**state, "epoch": 4}) == number
    with torch.no_grad():
        model.weight[0, 0] += 1
    assert contents_of(state) != number
    assert contents_of({"epoch": 3, "order": torch.arange(9)}) is None
    assert contents_of(model) is None  # what holds no tensors in the open


def test_memory_of_gpus_is_unknown_without_cuda():
    if torch.backends.cuda.is_built():
        pytest.skip("this build of torch has CUDA")
    assert memory_mb(torch) is None


@pytest.mark.slow
def test_compilations_are_counted_by_step():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch._dynamo.utils.compilation_time_metrics.clear()
    watch = Watch(steps=100)
    compiles = Compiles(watch)
    compiled = torch.compile(nn.Linear(8, 8), backend="eager", dynamic=False)
    for step in range(8):
        compiled(torch.randn(2 + min(step, 5), 8))
        watch.lanes.steps += 1
        if watch.lanes.steps >= watch.lanes.due:
            watch.attend()
    seen = compiles.so_far()
    assert [(step, graphs) for step, graphs, _ in seen] == [(2, 2), (4, 4), (8, 6), (8, 6)]
    seconds = [took for *_, took in seen]
    assert 0 < seconds[0] < seconds[1] < seconds[2] == seconds[3]


def test_nothing_is_told_where_nothing_was_compiled():
    torch._dynamo.utils.counters.clear()
    watch = Watch(steps=100)
    compiles = Compiles(watch)
    watch.lanes.steps = 2
    watch.attend()
    assert compiles.so_far() == []
    assert not torch._dynamo.utils.counters  # others ask whether it is empty


def step(watch):
    watch.lanes.steps += 1
    if watch.lanes.steps >= watch.lanes.due:
        watch.attend()


def test_a_round_trip_is_what_goes_back_from_the_same_memory_in_the_same_step():
    watch = Watch(steps=100)
    trips = RoundTrips(watch)
    to = copying(torch.Tensor.to, watch, trips)
    for _ in range(12):
        step(watch)
        on_host, other = torch.ones(4, 4), torch.ones(4, 4)  # as if one came from a GPU
        if trips.is_open:
            trips.to_host(on_host)
        to(torch.from_numpy(on_host.numpy())[1:], "meta")
        to(other, "meta")
        to(on_host, torch.float64)
    (found,) = [call for call in watch.calls.all() if call.kind == "round_trip"]
    assert (found.steps, found.count) == (12, 12)
    assert found.detail["watched_steps"] == 6
    assert found.site.file == __file__


@pytest.mark.parametrize("accelerator", [None, torch.device("cuda")])
def test_where_there_is_no_other_device_copies_are_not_looked_for(accelerator):
    names = ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__", "to", "cuda")
    plain = {name: getattr(torch.Tensor, name) for name in names}
    tensor = type("Tensor", (), dict(plain))
    device = SimpleNamespace(current_accelerator=lambda check_available: accelerator)
    watch_tensors(SimpleNamespace(Tensor=tensor, accelerator=device), Watch())
    watched = {name for name in names if getattr(tensor, name) is not plain[name]}
    assert {"to", "cuda"} <= watched if accelerator else not {"to", "cuda"} & watched
    assert {"item", "cpu"} <= watched


def test_what_goes_back_in_a_later_step_is_no_round_trip():
    watch = Watch(steps=100)
    trips = RoundTrips(watch)
    to = copying(torch.Tensor.to, watch, trips)
    on_host = torch.ones(4, 4)
    for _ in range(3):
        step(watch)
    trips.to_host(on_host)
    step(watch)
    to(on_host, "meta")
    assert trips.is_open
    assert [call.kind for call in watch.calls.all()] == ["to_device"]


class Keeping(torch.utils.data.Dataset):
    def __init__(self, every):
        self.every, self.cache = every, {}

    def __len__(self):
        return 1000

    def __getitem__(self, i):
        if not i % self.every:
            self.cache[i] = torch.zeros(3)
        return torch.zeros(3)


@pytest.mark.parametrize(("every", "epochs", "kept"), [(1, 1, 1.0), (4, 1, 0.25), (1, 2, 0.5)])
def test_what_a_dataset_keeps_of_each_sample_is_counted(every, epochs, kept):
    dataset = torch.utils.data.Subset(Keeping(every), range(1000))
    loader = torch.utils.data.DataLoader(dataset, batch_size=4)
    seen = SeenLoader(loader, None, 0)
    assert seen.result().kept_per_sample is None
    for _ in range(epochs):
        for batch in loader:
            seen.took(batch, 1)
    assert seen.result().kept_per_sample == pytest.approx(kept, rel=0.1)
    workers = torch.utils.data.DataLoader(dataset, batch_size=4, num_workers=1)
    seen = SeenLoader(workers, None, 1)
    for _ in range(250):
        seen.took(None, 1)
    assert seen.result().kept_per_sample is None


def test_a_look_that_fails_is_noted_and_the_script_goes_on():
    watch, looks = Watch(), []

    def fails():
        raise KeyError("weight")

    watch.aside(fails, lambda: looks.append(1), fails)
    assert looks == [1]
    (note,) = watch.notes
    assert note.startswith("a look failed, and what it would have seen is missing: KeyError")
    assert "test_observe_facts.py" in note


@pytest.mark.parametrize(
    "shape", [(1024, 1024), (1025, 1025), (64, 256, 4, 4), (4096,), (3, 0), ()]
)
def test_numbers_that_are_looked_at_lie_in_all_rows_and_columns(shape):
    at = torch.arange(math.prod(shape)).reshape(shape)
    looked = some_of(at, 1024)
    assert len(looked) >= min(at.numel(), 1000)
    if len(shape) == 2 and at.numel():
        rows, columns = looked // shape[1], looked % shape[1]
        assert len(rows.unique()) > 1000
        assert len(columns.unique()) > 1000


def test_a_loader_is_made_by_the_users_line_or_what_a_library_made_it_from():
    made, rows = MadeAt(), TensorDataset(torch.zeros(4))

    def make(dataset, file):
        loader = DataLoader(dataset)
        names = {"note": lambda: made.note(loader, sys._getframe(1))}
        exec(compile("\n\nnote()", file, "exec"), names)
        return loader

    library = torch.utils.data.__file__
    mine, again = make(rows, "<stdin>"), make(rows, library)
    assert made.of(mine) == made.of(again) == Site("<stdin>", 3)
    # Made by a library alone: the user's line above it.
    other = made.of(make(TensorDataset(torch.zeros(4)), library))
    assert (other.file, other.code) == (__file__, "")
    assert made.of(make([1, 2], "<stdin>")) == Site("<stdin>", 3)
    assert made.of(make([1, 2], library)).file == __file__
    assert made.of(DataLoader(rows)) is None
