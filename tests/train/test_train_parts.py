"""Parts: the user's own code around a step, alone and with micro-batches, resume and tuning."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from train_jobs import data, network, plain_fit, quiet, same, trainer

import flatout
from flatout.data.randomness import order
from flatout.errors import CheckpointError, FlatoutError, NumbersError
from flatout.recipe import Compute, Memory, Recipe
from flatout.train.part import Chain, Part
from flatout.train.parts.order import ORDER, REASONS
from flatout.train.parts.table_rows import TableRows

pytestmark = pytest.mark.usefixtures("one_thread")


class Nothing(flatout.Part):
    """Defines no hook."""


class Calls(flatout.Part):
    """Notes which hooks are called."""

    def __init__(self):
        self.calls = []

    def prepare(self, job):
        self.calls.append(("prepare", type(job).__name__))

    def around_step(self, step, run):
        self.calls.append(("around_step", step.number, len(step.batches)))
        return run(step)

    def around_piece(self, piece, run):
        self.calls.append(("around_piece", piece.size))
        return run(piece)

    def before_update(self, step):
        assert all(p.grad is not None for p in step.turn.update.parameters)
        self.calls.append(("before_update", step.number))

    def after_step(self, step, done):
        self.calls.append(("after_step", step.number, torch.isfinite(done.loss).item()))

    def close(self, error):
        self.calls.append(("close", type(error).__name__))


class Lookahead(flatout.Part):
    """Every few steps, the weights go half of the way that they came (Zhang et al., 2019)."""

    def __init__(self, every=3):
        self.every, self.steps, self.slow = every, 0, []

    def prepare(self, job):
        self.parameters = list(job.model.parameters())
        self.slow = [p.detach().clone() for p in self.parameters]

    @torch.no_grad()
    def after_step(self, step, done):
        self.steps += 1
        if self.steps % self.every == 0:
            for fast, slow in zip(self.parameters, self.slow, strict=True):
                slow.lerp_(fast, 0.5)
                fast.copy_(slow)

    def state_dict(self):
        return {"steps": self.steps, "slow": self.slow}

    def load_state_dict(self, state):
        self.steps, self.slow = state["steps"], state["slow"]


class OtherNames(flatout.Part):
    """Names the arguments of its hooks in its own way."""

    def around_step(self, one, make):
        return make(one)

    def around_piece(self, batch, forward):
        return forward(batch)


class Doubled(flatout.Part):
    """Doubles the gradients."""

    def before_update(self, step):
        for parameter in step.turn.update.parameters:
            parameter.grad.mul_(2)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05)


def job(model, *parts, allow="exact", **options):
    return trainer(model, optimizer=sgd, parts=parts, allow=allow, **options)


def fit(job, epochs=2, **options):
    return job.fit(data(), batch_size=32, epochs=epochs, progress=False, **options)


@pytest.mark.parametrize("part", [Nothing, OtherNames])
def test_a_part_that_does_nothing_changes_no_bit(part):
    ours, theirs = network(), network()
    torch.manual_seed(5)
    history = fit(job(ours, part()))
    torch.manual_seed(5)
    losses = plain_fit(theirs, sgd(theirs.parameters()), *data())
    assert same(ours, theirs)
    assert history.history["loss"] == pytest.approx(losses, rel=1e-6)


def test_hooks_are_called_in_the_order_of_a_step():
    part = Calls()
    fit(job(network(), part, accumulate=2, recipe=Recipe(memory=Memory(micro_batch=20))), epochs=1)
    samples = len(data()[0])
    assert part.calls[0] == ("prepare", "Loop")
    assert part.calls[-1] == ("close", "NoneType")
    first = part.calls[1 : part.calls.index(("after_step", 1, True)) + 1]
    assert first == [
        ("around_step", 1, 2),
        *[("around_piece", 16)] * 4,
        ("before_update", 1),
        ("after_step", 1, True),
    ]
    assert sum(call[1] for call in part.calls if call[0] == "around_piece") == samples


def test_gradients_are_changed_before_the_update():
    ours, theirs = network(), network()
    torch.manual_seed(5)
    fit(job(ours, Doubled()))
    torch.manual_seed(5)
    plain_fit(theirs, torch.optim.SGD(theirs.parameters(), lr=0.1), *data())
    assert same(ours, theirs)


def test_a_step_may_be_replaced():
    class OfHalf(flatout.Part):
        def around_step(self, step, run):
            (batch,) = step.batches
            return run(flatout.Step(step.number, [batch.rows(0, 16)], step.compute, step.turn))

    ours, theirs = network(), network()
    torch.manual_seed(5)
    fit(job(ours, OfHalf()), epochs=1)
    optimizer, (x, y) = sgd(theirs.parameters()), data()
    torch.manual_seed(5)
    for at in torch.from_numpy(order(len(x), 0, 0)).split(32):
        optimizer.zero_grad()
        F.cross_entropy(theirs(x[at[:16]]), y[at[:16]]).backward()
        optimizer.step()
    assert same(ours, theirs)


def test_a_loop_takes_parts_and_drops_them():
    class Twice(Calls):
        def prepare(self, job):
            self.job = job

        def after_step(self, step, done):
            super().after_step(step, done)
            if step.number == 2:
                self.job.drop(self)

    model, part = network(), Twice()
    loop = flatout.Loop(parts=[part], say=quiet)
    source = flatout.data.as_source(data(), batch_size=32, seed=0)
    loop.prepare(model, sgd(model.parameters()))
    for batch in loop.batches(source):
        loop.step(lambda b: F.cross_entropy(model(b.inputs), b.targets), batch)
    loop.close()
    assert loop.step_count > 2
    assert [call[1] for call in part.calls if call[0] == "around_step"] == [1, 2]


def test_a_resume_goes_on_with_the_state_of_parts(tmp_path):
    whole, begun = network(), network()
    torch.manual_seed(5)
    fit(job(whole, Lookahead()), epochs=4)
    torch.manual_seed(5)
    fit(job(begun, Lookahead(), run=tmp_path), epochs=2)
    fit(job(resumed := network(), Lookahead(), run=tmp_path), epochs=4, resume=True)
    assert same(resumed, whole)
    assert not same(begun, whole)
    with pytest.raises(CheckpointError, match=r"parts\n\s+then: Lookahead\n\s+now:  none"):
        fit(job(network(), run=tmp_path), epochs=5, resume=True)


def test_a_part_that_was_dropped_keeps_its_state_and_is_closed(tmp_path):
    class Once(Lookahead):
        is_closed = False

        def prepare(self, job):
            super().prepare(job)
            self.job = job

        def after_step(self, step, done):
            super().after_step(step, done)
            self.job.drop(self)

        def close(self, error):
            self.is_closed = True

    part = Once()
    fit(job(network(), part, run=tmp_path))
    assert (part.steps, part.is_closed) == (1, True)
    again = Once()
    fit(job(network(), again, run=tmp_path), epochs=3, resume=True)
    assert again.steps == 2


@pytest.mark.slow
def test_rows_of_tables_are_stepped_in_a_rehearsal_too(monkeypatch):
    """A compiled model is rehearsed before its first step, on the Parts that follow the user's."""
    made = []
    act = TableRows.around_step

    def noted(self, step, run):
        made.append(step.number)
        return act(self, step, run)

    monkeypatch.setattr(TableRows, "around_step", noted)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(40, 8), nn.Flatten(), nn.Linear(32, 2))
    model.compile(backend="eager")
    ids, y = torch.randint(0, 40, (640, 4)), torch.randint(0, 2, (640,))
    source = flatout.data.as_source((ids, y), batch_size=32, seed=0)
    loop = flatout.Loop(say=quiet)
    loop.terms = replace(loop.terms, fewest_steps=1)
    loop.prepare(
        model,
        sgd(model.parameters()),
        compute=lambda b: F.cross_entropy(model(b.inputs), b.targets),
        data=source,
        steps=1_000_000,
    )
    assert made
    loop.close()


def test_a_part_learns_what_has_ended_the_training():
    class Fails(Calls):
        def around_piece(self, piece, run):
            raise KeyError("mine")

    part = Fails()
    with pytest.raises(KeyError, match="mine"):
        fit(job(network(), part))
    assert part.calls[-1] == ("close", "KeyError")


def test_what_is_no_part_and_what_is_no_hook_is_refused():
    with pytest.raises(FlatoutError, match="found function"):
        job(network(), lambda step: None)

    class Misspelled(flatout.Part):
        def after_steps(self, step, done):
            pass

    with pytest.raises(FlatoutError, match=r"Misspelled.after_steps is no hook.*\n.*to after_step"):
        job(network(), Misspelled())


@pytest.mark.parametrize("kind", [Calls, Doubled])
def test_settings_are_tried_around_parts_and_graphs_leave_them(kind, tmp_path, monkeypatch):
    """A graph would leave out what acts within a step, so that such steps run without."""
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path))
    asked = Recipe(compute=Compute(capture="on"))
    history = fit(job(network(norm=False), kind(), recipe=asked, allow="tolerant"), epochs=3)
    assert any("within a step" in note for note in history.notes)


def test_each_kind_of_part_has_a_place_and_a_reason():
    assert len(set(ORDER)) == len(ORDER)
    assert all(reason for reason in REASONS.values())
    names = {kind.__name__: place for place, kind in enumerate(ORDER)}
    assert names["NumbersGuard"] < names["Tuner"] < names["Part"] < names["Graphs"]

    made = []

    class First(Part):
        def around_step(self, step, run):
            made.append(type(self).__name__)
            return run(step)

    class Second(First):
        pass

    chain = Chain(lambda step: made.append("step"), [Second, Part])
    chain.add(First(), Second())
    chain.run(None)
    assert made == ["Second", "First", "step"]
    made.clear()
    chain.inside(Part)(None)
    assert made == ["step"]
    first = chain.find(First)
    chain.drop(first)
    chain.drop(first)
    made.clear()
    chain.run(None)
    assert made == (["First", "step"] if type(first) is Second else ["Second", "step"])


def test_a_copy_of_a_model_trains_alike_with_parts_and_dropout_by_sample():
    model = network(norm=False, dropout=0.5)
    twin = copy.deepcopy(model)
    keyed = Recipe(compute=Compute(dropout="by_sample"))
    pieces = Recipe(compute=Compute(dropout="by_sample"), memory=Memory(micro_batch=8))
    fit(job(model, Calls(), recipe=keyed))
    fit(job(twin, recipe=pieces))
    assert all(
        torch.allclose(a, b, rtol=1e-4, atol=1e-6)
        for a, b in zip(model.parameters(), twin.parameters(), strict=True)
    )


def test_bad_numbers_are_explained_through_parts():
    class Divides(Calls):
        def around_step(self, step, run):
            self.loss = super().around_step(step, run).loss.item()
            return flatout.train.part.Done(torch.tensor(self.loss), 1.0, 0, 0, 0, 0)

        def around_piece(self, piece, run):
            return super().around_piece(piece, run) / 0.0

    with pytest.raises(NumbersError, match="step 1"):
        fit(job(network(), Divides()))


def test_a_part_may_change_the_loss_of_a_piece():
    class Scaled(flatout.Part):
        def around_piece(self, piece, run):
            return run(piece) * 2

    ours, theirs = network(), network()
    torch.manual_seed(5)
    fit(job(ours, Scaled()))
    torch.manual_seed(5)
    twice = lambda output, target: F.cross_entropy(output, target) * 2  # noqa: E731
    plain_fit(theirs, sgd(theirs.parameters()), *data(), loss=twice)
    assert same(ours, theirs)
