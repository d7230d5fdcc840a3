"""fit: every kind of input, callbacks and their order, the History, the log, checkpoints."""

import json
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from train_jobs import (
    CLASSES,
    FEATURES,
    SAMPLES,
    StopAt,
    data,
    figures,
    network,
    plain_fit,
    quiet,
    same,
    saving,
    trainer,
)

import flatout
import idx_files
from flatout.errors import CheckpointError, ModelError
from flatout.recipe import Recipe, ResolvedRecipe, load
from flatout.save.checkpoint import Checkpoints
from flatout.train.callbacks import BestCheckpoint, EarlyStopping, JsonLines

pytestmark = pytest.mark.usefixtures("one_thread")


def plainly(x, y, **options) -> nn.Module:
    model = network(dropout=0)
    plain_fit(model, torch.optim.Adam(model.parameters(), lr=1e-2), x, y, **options)
    return model


def fitted(*given, model: nn.Module | None = None, **options) -> flatout.Trainer:
    loss = options.pop("loss", "cross_entropy")
    model = network(dropout=0) if model is None else model
    job = trainer(model, optimizer="adam", lr=1e-2, loss=loss)
    job.fit(*given, **{"epochs": 2, "progress": False, **options})
    return job


# -- inputs --------------------------------------------------------------------------------------


class Samples(Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


IN_OUR_ORDER = {
    "a tuple of tensors": lambda x, y: ((x, y),),
    "x and y": lambda x, y: (x, y),
    "numpy arrays": lambda x, y: (x.numpy(), y.numpy()),
    "a Dataset": lambda x, y: (Samples(x, y),),
    "a TensorDataset": lambda x, y: (TensorDataset(x, y),),
    "Arrays": lambda x, y: (flatout.data.Arrays(x, y),),
}


@pytest.mark.parametrize("form", IN_OUR_ORDER.values(), ids=IN_OUR_ORDER)
def test_data_in_our_order(form):
    x, y = data()
    assert same(fitted(*form(x, y), batch_size=32).model, plainly(x, y))


def in_batches(x, y):
    return [(x[at : at + 32], y[at : at + 32]) for at in range(0, len(x), 32)]


IN_THEIR_ORDER = {
    "a DataLoader": lambda x, y: DataLoader(TensorDataset(x, y), batch_size=32),
    "a list of batches": in_batches,
    "a function that returns an iterator": lambda x, y: lambda: iter(in_batches(x, y)),
    "numpy batches": lambda x, y: [(a.numpy(), b.numpy()) for a, b in in_batches(x, y)],
    "a source": lambda x, y: flatout.data.as_source((x, y), batch_size=32, shuffle=False),
}


@pytest.mark.parametrize("form", IN_THEIR_ORDER.values(), ids=IN_THEIR_ORDER)
def test_data_in_their_own_order(form, monkeypatch):
    x, y = data()
    job = fitted(form(x, y))
    monkeypatch.setattr("train_jobs.order", lambda n, seed, epoch: np.arange(n))
    assert same(job.model, plainly(x, y))
    assert job.history.batch_size == 32


def test_a_shuffling_loader_draws_as_in_a_plain_loop():
    x, y = data()
    ours, theirs = network(), network()
    torch.manual_seed(3)
    optimizer = torch.optim.Adam(theirs.parameters(), lr=1e-2)
    theirs.train()
    for _ in range(2):
        for inputs, labels in DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(theirs(inputs), labels).backward()
            optimizer.step()
    torch.manual_seed(3)
    fitted(DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True), model=ours)
    assert same(ours, theirs)


def test_a_generator_serves_one_epoch():
    x, y = data()
    job = fitted(iter(in_batches(x, y)), epochs=1)
    assert job.history.timeline.steps == 5


def test_sample_weights_weigh():
    x, y = data()
    weight = torch.linspace(0, 2, SAMPLES)
    ours, theirs = (network(dropout=0) for _ in range(2))
    optimizer = torch.optim.Adam(theirs.parameters(), lr=1e-2)
    each = nn.CrossEntropyLoss(reduction="none")
    for epoch in range(2):
        at_epoch = torch.from_numpy(flatout.data.randomness.order(SAMPLES, 0, epoch))
        for start in range(0, SAMPLES, 32):
            at = at_epoch[start : start + 32]
            optimizer.zero_grad()
            ((each(theirs(x[at]), y[at]) * weight[at]).sum() / weight[at].sum()).backward()
            optimizer.step()
    fitted((x, y, weight), model=ours, batch_size=32)
    assert same(ours, theirs)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(4, CLASSES), nn.Linear(FEATURES - 4, CLASSES)

    def forward(self, left, right):
        return self.left(left) + self.right(right)


@pytest.mark.parametrize("kind", [tuple, dict])
def test_several_inputs(kind):
    x, y = data()
    parts = (x[:, :4], x[:, 4:])
    ours, theirs = TwoInputs(), TwoInputs()

    class Joined(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = theirs

        def forward(self, x):
            return self.inner(x[:, :4], x[:, 4:])

    plain_fit(Joined(), torch.optim.Adam(theirs.parameters(), lr=1e-2), x, y)
    given = parts if kind is tuple else {"left": parts[0], "right": parts[1]}
    job = fitted((given, y), model=ours, batch_size=32)
    assert same(ours, theirs)
    with torch.no_grad():
        assert torch.equal(job.predict(given), theirs(*parts))
    assert job.evaluate((given, y))["loss"] == pytest.approx(job.evaluate(given, y)["loss"])


def test_idx_files(tmp_path):
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 256, (64, 5, 5), dtype=np.uint8)
    labels = draw.integers(0, CLASSES, 64, dtype=np.uint8)
    idx_files.write(tmp_path / "train-images-idx3-ubyte.gz", pixels)
    idx_files.write(tmp_path / "train-labels-idx1-ubyte", labels)

    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(25, CLASSES))

    ours, theirs = model(), model()
    x = (torch.from_numpy(pixels).float() / 255)[:, None]
    plain_fit(
        theirs, torch.optim.Adam(theirs.parameters(), lr=1e-2), x, torch.from_numpy(labels).long()
    )
    job = fitted(flatout.data.idx(tmp_path), model=ours, batch_size=32)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)
    assert job.predict(flatout.data.idx(tmp_path)).shape == (64, CLASSES)


def test_drop_last_and_order_as_given():
    x, y = data()
    seen = []

    class Indices(flatout.Callback):
        def on_step(self, state):
            seen.append(state.step_in_epoch)

    job = fitted((x, y), batch_size=32, drop_last=True, callbacks=[Indices()], epochs=1)
    assert seen == [1, 2, 3, 4]
    assert job.history.epochs[0]["loss"] > 0


# -- callbacks -----------------------------------------------------------------------------------


class Diary(flatout.Callback):
    """Notes each event with what the state says."""

    def __init__(self, name: str, diary: list, every: int = 1) -> None:
        self.name, self.diary, self.every = name, diary, every

    def _note(self, event, state):
        self.diary.append((self.name, event, state.epoch, state.step, state.step_in_epoch))

    def on_fit_start(self, state):
        self._note("fit start", state)

    def on_epoch_start(self, state):
        self._note("epoch start", state)

    def on_step(self, state):
        self._note("step", state)

    def on_evaluate_end(self, state):
        assert "val_loss" in state.logs
        self._note("evaluate", state)

    def on_epoch_end(self, state):
        assert state.read_loss() == state.logs["loss"]
        assert state.history.epochs[-1] is state.logs
        self._note("epoch end", state)

    def on_fit_end(self, state):
        self._note("fit end", state)


def test_callbacks_come_in_their_order_with_the_right_state():
    x, y = data(samples=96)
    diary = []
    callbacks = [Diary("a", diary), Diary("b", diary, every=2)]
    fitted((x, y), batch_size=32, validation_data=(x, y), callbacks=callbacks)
    of_a = [event for name, *event in diary if name == "a"]
    assert of_a == [
        ["fit start", 0, 0, 0],
        ["epoch start", 0, 0, 0],
        *[["step", 0, n, n] for n in (1, 2, 3)],
        ["evaluate", 0, 3, 3],
        ["epoch end", 0, 3, 3],
        ["epoch start", 1, 3, 0],
        *[["step", 1, n, n - 3] for n in (4, 5, 6)],
        ["evaluate", 1, 6, 3],
        ["epoch end", 1, 6, 3],
        ["fit end", 1, 6, 0],
    ]
    steps_of_b = [event[3] for event in diary if event[:2] == ("b", "step")]
    assert steps_of_b == [2, 4, 6]
    names = [name for name, event, *_ in diary if event != "step"]
    assert names == ["a", "b"] * (len(names) // 2)


def test_the_last_step_of_gathered_batches_is_a_step_like_any_other():
    """Ten batches, four to a step: the third step is made of two."""
    x, y = data(samples=160)
    diary = []
    job = trainer(network(), accumulate=4)
    job.fit((x, y), batch_size=16, epochs=2, callbacks=[Diary("a", diary)], progress=False)
    assert [event[3] for event in diary if event[1] == "step"] == [1, 2, 3, 4, 5, 6]
    assert job.history.timeline.steps == 6


@pytest.mark.parametrize("step", [2, 3])
def test_stop_ends_training_after_the_step(step):
    x, y = data(samples=96)
    stop = StopAt(step, lambda state: state.stop("enough"))
    history = fitted((x, y), batch_size=32, epochs=5, callbacks=[stop]).history
    assert history.timeline.steps == step
    # The figures of an epoch are there if it was whole.
    assert len(history.epochs) == (1 if step == 3 else 0)
    assert history.stop_reason == "enough"


def test_early_stopping_puts_the_best_weights_back():
    x, y = data()
    kept = {}

    class Spoil(flatout.Callback):
        def on_epoch_start(self, state):
            if state.epoch == 1:
                kept.update({k: v.clone() for k, v in state.model.state_dict().items()})
                state.trainer.optimizer.param_groups[0]["lr"] = 10.0

    callbacks = [Spoil(), EarlyStopping("val_loss", patience=2)]
    job = fitted((x, y), epochs=9, validation_data=(x, y), callbacks=callbacks)
    assert len(job.history.epochs) == 3
    assert "did not improve for 2 epochs" in job.history.stop_reason
    assert all(torch.equal(v, kept[k]) for k, v in job.model.state_dict().items())


def test_an_error_in_a_callback_reaches_all_and_leaves_the_model_as_it_was():
    x, y = data()
    ended = []

    class Last(flatout.Callback):
        def on_fit_error(self, state, error):
            ended.append(error)

        def on_fit_end(self, state):
            ended.append("end")

    error = RuntimeError("mine")

    def fail(state):
        raise error

    model = network()
    layers = [type(m) for m in model]
    job = trainer(model)
    with pytest.raises(RuntimeError, match="mine"):
        job.fit((x, y), callbacks=[StopAt(2, fail), Last()], progress=False)
    assert ended == [error]
    assert [type(m) for m in model] == layers
    assert job.history.timeline.steps == 2  # what there is of it
    job.fit((x, y), progress=False)


def test_the_best_checkpoint_outlives_the_newest(tmp_path):
    x, y = data()
    best = BestCheckpoint("val_loss")

    class Spoil(flatout.Callback):
        def on_epoch_start(self, state):
            if state.epoch == 2:
                state.trainer.optimizer.param_groups[0]["lr"] = 10.0

    job = trainer(network(dropout=0), recipe=saving(keep_last=1), run=tmp_path / "run")
    # The best one is asked for before the others had their turn: it holds their state all the same.
    history = job.fit(
        (x, y),
        batch_size=50,
        epochs=5,
        validation_data=(x, y),
        callbacks=[best, Spoil()],
        progress=False,
    )
    losses = history.history["val_loss"]
    assert min(losses) == losses[1] == best.best
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == [
        "step-000000006",
        "step-000000015",
    ]
    assert checkpoints.best() == "step-000000006" == Path(best.path).name
    assert checkpoints.load("step-000000006").score == pytest.approx(losses[1])
    assert len(checkpoints.load("step-000000006").state["extra"]["history"]) == 2


def test_the_best_checkpoints_path_is_exact_where_the_step_was_saved_already(tmp_path):
    x, y = data()
    best = BestCheckpoint("loss")
    seen = []

    class Watch(flatout.Callback):
        def on_checkpoint(self, state, path):
            seen.append(path)

    job = trainer(network(), recipe=saving(every=5), run=tmp_path / "run")
    job.fit((x, y), batch_size=30, epochs=1, callbacks=[best, Watch()], progress=False)
    assert Path(best.path).is_dir()
    assert seen == [best.path.removesuffix(".1"), best.path]


def test_a_callback_may_save_at_any_step(tmp_path):
    x, y = data()
    paths = []
    ask = StopAt(3, lambda state: paths.append(state.trainer.save_checkpoint()))
    job = trainer(network(), run=tmp_path / "run")
    job.fit((x, y), batch_size=32, callbacks=[ask], progress=False)
    assert paths == [f"{tmp_path}/run/checkpoints/step-000000003"]
    assert Checkpoints(tmp_path / "run" / "checkpoints").load(Path(paths[0]).name).step == 3
    # And the user after the fit.
    after = job.save_checkpoint(score=1.0)
    assert Checkpoints(tmp_path / "run" / "checkpoints").best() == Path(after).name


def test_saving_needs_a_run_folder_and_a_fit(tmp_path):
    with pytest.raises(CheckpointError, match="before the first fit"):
        trainer(network(), run=tmp_path).save_checkpoint()
    job = fitted(data())
    with pytest.raises(CheckpointError, match="there is no run folder"):
        job.save_checkpoint()


def test_checkpoints_come_after_each_epoch_or_every_n_steps_and_at_the_end(tmp_path):
    x, y = data(samples=128)

    def saved(recipe, run, **options):
        job = trainer(network(), recipe=recipe, run=tmp_path / run)
        job.fit((x, y), batch_size=32, epochs=3, progress=False, **options)
        return sorted(p.name[-2:] for p in (tmp_path / run / "checkpoints").iterdir())

    many = {"keep_last": 9}
    assert saved(saving(**many), "a") == ["04", "08", "12"]
    assert saved(saving(every=5, **many), "b") == ["05", "10", "12"]
    assert saved(saving(every=5, keep_last=2, asynchronous=False), "c") == ["10", "12"]
    stop = StopAt(7, lambda state: state.stop("enough"))
    assert saved(saving(every=5, **many), "d", callbacks=[stop]) == ["05", "07"]


# -- what is left behind -------------------------------------------------------------------------


def test_the_figures_of_an_epoch_are_weighted_means():
    x, y = data(samples=100)
    model = network(dropout=0, norm=False)
    job = trainer(model, optimizer="sgd", lr=0.0, metrics=["accuracy"])
    history = job.fit((x, y), batch_size=33, epochs=1, validation_data=(x, y), progress=False)
    with torch.no_grad():
        loss = float(nn.functional.cross_entropy(model(x), y))
        accuracy = float((model(x).argmax(1) == y).float().mean())
    logs = history.epochs[0]
    for name, value in (("loss", loss), ("accuracy", accuracy)):
        assert logs[name] == pytest.approx(value, rel=1e-6)
        assert logs[f"val_{name}"] == pytest.approx(value, rel=1e-6)


def test_lanes_and_step_times_add_up_to_the_wall_time(fake_clock):
    x, y = data(samples=400)

    class Slow(Samples):
        def __getitems__(self, indices):
            fake_clock.sleep(0.004)
            return [self[i] for i in indices]

    marks = []

    class Watch(flatout.Callback):
        def on_step(self, state):
            marks.append(fake_clock.perf_counter())

    job = trainer(network(), accumulate=2)
    validation = (x, y)
    history = job.fit(
        Slow(x, y),
        batch_size=10,
        epochs=2,
        callbacks=[Watch()],
        validation_data=validation,
        progress=False,
    )
    steps = history.timeline.steps
    assert steps == len(history.step_times) == len(marks) == 40
    lanes = history.lanes()
    # From the first step's end to the last one's; the lanes begin one step earlier.
    wall = marks[-1] - marks[0] + history.step_times[0]
    assert sum(lanes.values()) * steps / 1e3 == pytest.approx(wall, rel=1e-3)
    # Both batches of a step were waited for.
    assert lanes["input"] == pytest.approx(8, rel=0.01)
    assert lanes["evaluation"] > 0
    assert history.throughput == pytest.approx(20 / np.median(history.step_times))


def test_the_run_folder_tells_what_ran(tmp_path):
    x, y = data()
    job = trainer(network(), metrics=["accuracy"], run=tmp_path / "run")
    history = job.fit((x, y), batch_size=32, epochs=3, validation_data=(x, y), progress=False)
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").open()]
    epochs = [line for line in lines if line["kind"] == "epoch"]
    assert [line["epoch"] for line in epochs] == [1, 2, 3]
    assert [line["step"] for line in epochs] == [5, 10, 15]
    for line, logs in zip(epochs, history.epochs, strict=True):
        assert line.items() >= logs.items()
    recipe = load(tmp_path / "run" / "recipe.toml")
    assert isinstance(recipe, ResolvedRecipe)
    assert recipe == job.resolved == history.recipe


def test_without_a_run_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fitted(data())
    assert list(tmp_path.iterdir()) == []


def test_a_run_in_a_store(tmp_path):
    x, y = data()
    job = trainer(network(), run="memory://train-fit/run/")
    job.fit((x, y), batch_size=32, epochs=1, progress=False)
    again = trainer(network(), run="memory://train-fit/run")
    history = again.fit((x, y), batch_size=32, epochs=2, resume=True, progress=False)
    assert history.epochs[0]["loss"] == job.history.epochs[0]["loss"]
    assert history.timeline.steps == 5


def test_users_loggers_are_not_counted_as_state(tmp_path):
    """A log may be added to a resumed run, a stateful callback may not."""
    x, y = data()
    run = {"run": tmp_path / "run", "recipe": saving()}
    trainer(network(), **run).fit((x, y), epochs=1, progress=False)
    job = trainer(network(), **run)
    log = JsonLines(tmp_path / "more.jsonl", every=1)
    job.fit((x, y), epochs=2, callbacks=[log], resume=True, progress=True)
    assert len((tmp_path / "more.jsonl").read_text().splitlines()) == 6


# -- the cost of a step --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "optimizer",
    [
        # torch's plain Adam reads its step count on its own.
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lambda parameters: torch.optim.Adam(parameters, fused=True),
    ],
    ids=["plain", "fused"],
)
@pytest.mark.parametrize("metrics", [[], ["accuracy"]], ids=str)
def test_a_step_reads_nothing_but_the_guards_flag(monkeypatch, metrics, optimizer):
    x, y = data(samples=3200)
    readers = []
    for name in ("item", "tolist", "__float__", "__int__", "__bool__", "numpy", "cpu"):
        plain = getattr(torch.Tensor, name)

        def counted(tensor, *args, _plain=plain):
            readers.append(sys._getframe(1).f_code.co_qualname)
            return _plain(tensor, *args)

        monkeypatch.setattr(torch.Tensor, name, counted)
    marks = []

    class Watch(flatout.Callback):
        every = 50

        def on_step(self, state):
            marks.append(len(readers))

    job = trainer(network(), metrics=metrics, optimizer=optimizer)
    job.fit((x, y), batch_size=16, epochs=1, callbacks=[Watch()], progress=False)
    assert len(marks) == 4
    between = readers[marks[0] : marks[-1]]
    assert set(between) == {"Update.was_bad"}
    # Before the update, where the optimizer cannot gate it, and after it.
    assert 150 <= len(between) <= 300


def test_a_fused_optimizer_is_fused_where_it_is_asked_for():
    x, y = data()
    fused = []

    class Look(flatout.Callback):
        def on_step(self, state):
            fused.append(state.trainer.optimizer.param_groups[0]["fused"])

    job = trainer(network(), recipe=Recipe(compute={"fused_optimizer": "on"}))
    job.fit((x, y), batch_size=16, epochs=1, callbacks=[Look()], progress=False)
    assert job.resolved.compute.fused_optimizer == "on"
    assert set(fused) == {True}


def test_a_fit_in_a_thread(tmp_path):
    x, y = data()
    ours, theirs = network(), network()
    torch.manual_seed(7)
    history = trainer(ours).fit((x, y), epochs=2, progress=False)
    found = []

    def work():
        torch.manual_seed(7)
        found.append(trainer(theirs).fit((x, y), epochs=2, progress=False))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert figures(found[0]) == figures(history)
    assert same(ours, theirs)


def test_best_checkpoint_without_a_run_folder_says_so():
    with pytest.raises(CheckpointError, match="no run folder"):
        fitted(data(), callbacks=[BestCheckpoint("loss")])


def test_a_figure_that_is_not_there_is_named():
    with pytest.raises(ModelError, match="no figure is called 'val_loss'"):
        fitted(data(), callbacks=[EarlyStopping("val_loss")])


def test_flatouts_words_go_through_say(capsys):
    x, y = data()
    said = []
    flatout.Trainer(network(), say=said.append).fit((x, y), progress=False)
    assert any(line.startswith("auto: ") for line in said)
    flatout.Trainer(network(), say=quiet).fit((x, y), progress=False)
    assert capsys.readouterr().err == ""
