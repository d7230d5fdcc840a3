"""What a side of a trial tells of its batches: numbers that are equal where the contents are."""

from threading import get_ident
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from flatout.doctor.trials import recording
from flatout.doctor.trials.recording import Stepping, content_of
from flatout.doctor.trials.step_sync import RECORDED
from flatout.observe.lanes import AFTER, BACKWARD, EVALUATION, FORWARD, HOST
from flatout.observe.watch import Watch

MINUTE, HOUR = 60.0, 3600.0


def let_pass(lanes, seconds):
    """Its time is read on: far more than what runs here takes on any machine."""
    lanes.last -= int(seconds * 1e9)
    lanes.began -= int(seconds * 1e9)


def batch(**changes):
    made = {
        "x": torch.arange(12.0).reshape(3, 4),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "y": np.array([1, 2, 3]),
        "more": [torch.tensor(True), ("a", 1.5, None), torch.zeros(0)],
    }
    return made | changes


def test_equal_batches_have_equal_numbers():
    found = content_of(batch())
    assert isinstance(found, int)
    assert found == content_of(batch())
    grown = batch(x=torch.arange(24.0).reshape(3, 8)[:, ::2].div(2).requires_grad_())
    assert found == content_of(grown)  # the same numbers, in another place of memory


@pytest.mark.parametrize(
    "changes",
    [
        {"x": torch.arange(12.0).reshape(4, 3)},
        {"x": torch.nextafter(torch.arange(12.0), torch.tensor(9.0)).reshape(3, 4)},
        {"half": torch.zeros(3, dtype=torch.bfloat16)},
        {"y": np.array([1, 2, 4])},
        {"y": np.array([1.0, 2.0, 3.0])},
        {"more": [torch.tensor(False), ("a", 1.5, None), torch.zeros(0)]},
        {"more": [torch.tensor(True), ("a", 1.5), None, torch.zeros(0)]},
        {"z": 0},
    ],
)
def test_other_batches_have_other_numbers(changes):
    assert content_of(batch(**changes)) != content_of(batch())


def test_what_cannot_be_read_has_none():
    assert content_of([torch.ones(2), object()]) is None
    assert content_of(np.array([object()])) is None
    assert content_of(torch.ones(2, device="meta")) is None


def test_workers_give_the_same_numbers_and_redrawing_does_not():
    class Noisy(TensorDataset):
        def __getitem__(self, index):
            (x,) = super().__getitem__(index)
            return x + torch.rand(()) * self.noise

    def contents(noise, workers):
        torch.manual_seed(0)
        data = Noisy(torch.arange(64.0))
        data.noise = noise
        loader = DataLoader(data, batch_size=8, num_workers=workers)
        return [content_of(one) for one in loader]

    assert contents(0.0, 0) == contents(0.0, 2)
    assert contents(0.1, 0) != contents(0.1, 2)


@pytest.mark.parametrize("most", [0, 3])
def test_as_many_steps_are_recorded_as_it_is_told(monkeypatch, most):
    monkeypatch.setenv(recording.RECORDED, str(most))
    record = Stepping().record
    wants = [record.end_step() for _ in range(5)]
    assert wants == [step < most for step in range(1, 6)]
    for _ in range(5):
        record._batch(0, [1, 2])
        record._content(0, batch())
    taken = record.taken()
    assert [
        len(taken["losses"]),
        *(len(taken[of].get(0, [])) for of in ("batches", "contents")),
    ] == [most] * 3


def test_waiting_for_the_other_side_is_no_evaluation(monkeypatch):
    watch = Stepping()
    lanes = watch.lanes
    monkeypatch.setattr(recording, "at_step", lambda steps: let_pass(lanes, HOUR) or steps)
    for _ in range(3):
        lanes.switch(BACKWARD)
        lanes.leave_backward(AFTER)
        lanes.leave_step()
        watch.attend()
        # Evaluated without a loader, right after a block has ended.
        lanes.begin_evaluation(SimpleNamespace(was_evaluated=lambda step: None))
        let_pass(lanes, MINUTE)
        lanes.switch(HOST)
        lanes.judge()
    assert 2 * MINUTE * 1e9 <= watch.between < HOUR * 1e9
    assert sum(lanes.step_ms()) < MINUTE * 1e3


def test_once_the_losses_are_recorded_only_steps_that_a_block_needs_are_looked_at(monkeypatch):
    asked = []
    monkeypatch.setenv(RECORDED, "6")
    monkeypatch.setattr(recording, "at_step", lambda steps: asked.append(steps) or 40)

    def plain(*args):
        lanes.switch(BACKWARD)
        lanes.leave_backward(AFTER)

    stub = SimpleNamespace(
        autograd=SimpleNamespace(backward=plain), compiler=torch.compiler, Tensor=torch.Tensor
    )

    class Loader:
        def _next_index(self): ...
        def __next__(self): ...

    functions = dict(vars(Loader))
    watch = Stepping()
    lanes = watch.lanes
    watch.record.watch_losses(stub)
    watch.record.watch_batches(SimpleNamespace(_BaseDataLoaderIter=Loader))
    assert vars(Loader)["_next_index"] is not functions["_next_index"]
    lanes.thread = get_ident()
    looked_at = []
    for step in range(1, 101):
        stub.autograd.backward(torch.tensor(float(step)))
        if lanes.leave_step():
            watch.attend()
            looked_at.append(step)
    assert stub.autograd.backward is plain
    for name in ("_next_index", "__next__"):
        assert vars(Loader)[name] is functions[name]
    assert looked_at[:6] == [1, 2, 3, 4, 5, 6]
    assert 46 in looked_at
    assert 86 in looked_at
    assert len(looked_at) < 12  # other looks are rare
    assert sum(asked) == looked_at[-1]
    assert watch.told()["losses"] == [1, 2, 3, 4, 5, 6]


def test_an_evaluation_lasts_until_the_next_step_begins():
    lanes = Watch().lanes
    lanes.begin_evaluation(SimpleNamespace(was_evaluated=lambda step: None))
    lanes.switch(FORWARD)
    let_pass(lanes, HOUR)  # no one looks at the clock
    lanes.judge()
    assert lanes.spent[EVALUATION] >= HOUR * 1e9
    assert lanes.spent[FORWARD] < MINUTE * 1e9


def test_what_came_before_an_evaluation_is_none_of_it():
    lanes = Watch().lanes
    let_pass(lanes, HOUR)
    lanes.begin_evaluation(SimpleNamespace(was_evaluated=lambda step: None))
    lanes.switch(HOST)
    lanes.judge()
    assert lanes.spent[EVALUATION] < MINUTE * 1e9
    assert lanes.spent[HOST] >= HOUR * 1e9
