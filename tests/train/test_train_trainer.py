"""The Trainer against the loop that a user would write by hand, and its other verbs."""

from dataclasses import replace

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler
from train_jobs import (
    ALWAYS_TUNED,
    close,
    convnet,
    data,
    images,
    network,
    plain_fit,
    same,
    same_state,
    trainer,
)

import flatout
from flatout.errors import CheckpointError, ModelError
from flatout.recipe import Compute, Memory, Recipe
from flatout.train.callbacks import BestCheckpoint, EarlyStopping

pytestmark = pytest.mark.usefixtures("one_thread")


def _groups(model: nn.Module) -> torch.optim.Optimizer:
    first, last = model[0].parameters(), [p for part in model[1:] for p in part.parameters()]
    return torch.optim.AdamW(
        [{"params": first, "lr": 3e-3}, {"params": last, "weight_decay": 0.0}], lr=1e-2
    )


OPTIMIZERS = {
    "Adam": lambda m: torch.optim.Adam(m.parameters(), lr=1e-2),
    "Adam, amsgrad": lambda m: torch.optim.Adam(m.parameters(), lr=1e-2, amsgrad=True),
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1),
    "SGD, momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-3),
    "groups": _groups,
    "Adam, fused by the user": lambda m: torch.optim.Adam(m.parameters(), lr=1e-2, fused=True),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_exact_is_bit_identical_to_a_handwritten_loop(make):
    x, y = data()
    ours, theirs = network(), network()
    ours_with, theirs_with = make(ours), make(theirs)
    torch.manual_seed(7)
    losses = plain_fit(theirs, theirs_with, x, y, epochs=3)
    torch.manual_seed(7)
    history = trainer(ours, optimizer=ours_with).fit(
        (x, y), batch_size=32, epochs=3, progress=False
    )
    assert same(ours, theirs)
    assert same_state(ours_with, theirs_with)
    assert history.history["loss"] == pytest.approx(losses, rel=1e-6)


SCHEDULERS = {
    "cosine, per step": (lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=15), "step"),
    "one cycle, per step": (lambda o: lr_scheduler.OneCycleLR(o, 0.05, total_steps=15), "step"),
    "exponential, per epoch": (lambda o: lr_scheduler.ExponentialLR(o, 0.5), "epoch"),
    "lambda, per epoch": (lambda o: lr_scheduler.LambdaLR(o, lambda e: 1 / (1 + e)), "epoch"),
}


@pytest.mark.parametrize(("make", "every"), SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize("clip", [{}, {"clip_norm": 0.5}, {"clip_value": 0.01}], ids=str)
def test_schedules_and_clipping_are_bit_identical(make, every, clip):
    x, y = data()
    ours, theirs = network(), network()
    ours_with, theirs_with = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (ours, theirs))
    torch.manual_seed(7)
    plain = {"scheduler": make(theirs_with), "schedule_every": every, **clip}
    plain_fit(theirs, theirs_with, x, y, epochs=3, **plain)
    torch.manual_seed(7)
    job = trainer(ours, optimizer=ours_with, scheduler=make, schedule_every=every, **clip)
    job.fit((x, y), batch_size=32, epochs=3, progress=False)
    assert same(ours, theirs)
    assert ours_with.param_groups[0]["lr"] == theirs_with.param_groups[0]["lr"]


@pytest.mark.parametrize("made", ["trainer", "loop"])
def test_a_recipe_may_be_the_path_of_its_file(tmp_path, made):
    path = tmp_path / "a.toml"
    path.write_text('[compute]\nprecision = "bf16"\n')
    loop = (
        flatout.Loop(path) if made == "loop" else flatout.Trainer(nn.Linear(2, 1), recipe=path).loop
    )
    assert loop.asked.recipe.compute.precision == "bf16"


def test_plateau_steps_by_epoch_on_the_validation_loss():
    x, y = data()
    model = network()
    made = []

    def plateau(optimizer):
        made.append(lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.99))
        return made[0]

    job = trainer(model, optimizer="sgd", lr=0.1, scheduler=plateau)
    history = job.fit((x, y), epochs=4, validation_data=(x, y), progress=False)
    # Nothing is ever better by 99%, so the rate falls after each epoch but the first.
    assert made[0].best == history.history["val_loss"][0]
    assert job.optimizer.param_groups[0]["lr"] == pytest.approx(1e-4)


def test_a_convnet_with_rewrites_is_bit_identical():
    x, y = images()
    ours, theirs = convnet(), convnet()
    ours_with, theirs_with = (torch.optim.Adam(m.parameters(), lr=1e-2) for m in (ours, theirs))
    torch.manual_seed(7)
    plain_fit(theirs, theirs_with, x, y, batch_size=16)
    torch.manual_seed(7)
    # The layers' names must not move with them.
    rewritten = Recipe(compute=Compute(rewrites="on"))
    job = trainer(ours, optimizer=ours_with, recipe=rewritten)
    job.fit((x, y), batch_size=16, epochs=2, progress=False)
    assert same(ours, theirs)
    assert [type(m) for m in ours] == [type(m) for m in theirs]


def test_steps_on_which_settings_are_tried_count():
    """Exact settings are tried, as in a long run; the result is still the plain loop's."""
    x, y = images(160)
    ours, theirs = convnet(), convnet()
    ours_with, theirs_with = (torch.optim.Adam(m.parameters(), lr=1e-2) for m in (ours, theirs))
    torch.manual_seed(7)
    plain_fit(theirs, theirs_with, x, y, batch_size=4, epochs=2)
    torch.manual_seed(7)
    said = []
    job = trainer(ours, optimizer=ours_with, say=said.append, metrics=["accuracy"])
    job.terms = replace(ALWAYS_TUNED, block_s=1e-4, most_pairs=1, few_far_slower=1e6)
    history = job.fit((x, y), batch_size=4, epochs=2, progress=False)
    assert same(ours, theirs)
    assert same_state(ours_with, theirs_with)
    assert said[0].startswith("auto: ")
    assert "too short" not in said[0]
    assert any(span["settings"] for span in history.tuning["spans"])
    assert 0 <= history.epochs[-1]["accuracy"] <= 1
    assert history.timeline.steps == 80


@pytest.mark.parametrize("accumulate", [2, 4])
def test_accumulation_is_one_large_batch_to_rounding(accumulate):
    x, y = data(samples=160)
    ours, theirs = (network(dropout=0, norm=False) for _ in range(2))
    ours_with, theirs_with = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, theirs))
    plain_fit(theirs, theirs_with, x, y, batch_size=16 * accumulate, epochs=2)
    job = trainer(ours, optimizer=ours_with, accumulate=accumulate)
    history = job.fit((x, y), batch_size=16, epochs=2, progress=False)
    assert close(ours, theirs)
    # The last step of an epoch takes what is left.
    assert history.timeline.steps == 2 * -(-160 // (16 * accumulate))
    assert history.batch_size == 16 * accumulate


def test_accumulation_weighs_by_the_counted_targets():
    """With ignore_index the weight of a batch is not its size."""
    x, y = data(samples=128)
    y = torch.where(torch.arange(128) % 7 < 3, -100, y)
    ours, theirs = (network(dropout=0, norm=False) for _ in range(2))
    ours_with, theirs_with = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, theirs))
    plain_fit(theirs, theirs_with, x, y, batch_size=64, epochs=2)
    trainer(ours, optimizer=ours_with, accumulate=4).fit(
        (x, y), batch_size=16, epochs=2, progress=False
    )
    assert close(ours, theirs)


def test_accumulation_with_another_ignore_index():
    """An ignored label may lie within the range of the labels, as a padding of 0 does."""
    x, y = data(samples=128)
    loss = nn.CrossEntropyLoss(ignore_index=0)
    ours, theirs = (network(dropout=0, norm=False) for _ in range(2))
    ours_with, theirs_with = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, theirs))
    plain_fit(theirs, theirs_with, x, y, batch_size=64, epochs=2, loss=loss)
    job = trainer(ours, optimizer=ours_with, loss=loss, accumulate=4)
    history = job.fit((x, y), batch_size=16, epochs=2, progress=False)
    assert close(ours, theirs)
    torch.manual_seed(0)
    with torch.no_grad():
        expected = float(loss(ours(x), y))
    assert job.evaluate((x, y))["loss"] == pytest.approx(expected, rel=1e-5)
    assert history.history["loss"][1] < history.history["loss"][0]


def test_micro_batches_are_the_whole_batch_to_rounding():
    x, y = data()
    ours, theirs = (network(dropout=0, norm=False) for _ in range(2))
    ours_with, theirs_with = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, theirs))
    plain_fit(theirs, theirs_with, x, y, batch_size=32)
    small = Recipe(memory=Memory(micro_batch=5))
    trainer(ours, optimizer=ours_with, recipe=small).fit(
        (x, y), batch_size=32, epochs=2, progress=False
    )
    assert close(ours, theirs)


def test_the_users_own_objects_hold_the_weights():
    x, y = data()
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    parameters, before = list(model.parameters()), model[0].weight.clone()
    job = trainer(model, optimizer=optimizer, allow="tolerant")
    job.fit((x, y), progress=False)
    assert job.model is model
    assert job.optimizer is optimizer
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert not torch.equal(model[0].weight, before)
    assert len(optimizer.state) == len(parameters)
    assert all(p.grad is None for p in parameters)
    # The user may go on with a loop of plain torch.
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def test_a_frozen_module_in_eval_mode_stays_so_through_fit():
    x, y = data()
    model = network()
    model[1].eval()
    seen = []

    class Look(flatout.Callback):
        def on_step(self, state):
            seen.append([m.training for m in state.model])

    before = model[1].running_mean.clone()
    trainer(model).fit((x, y), validation_data=(x, y), callbacks=[Look()], progress=False)
    assert seen[0] == seen[-1] == [True, False, True, True, True]
    assert torch.equal(model[1].running_mean, before)
    assert not model[1].training
    assert model[3].training


def test_a_model_in_eval_mode_trains_all_the_same():
    x, y = data()
    model = network().eval()
    trainer(model).fit((x, y), progress=False)
    assert model.training
    assert int(model[1].num_batches_tracked) == 5


def test_a_train_of_the_models_own_is_called():
    class KeepsStatistics(nn.Sequential):
        def train(self, mode=True):
            super().train(mode)
            self[1].eval()
            return self

    x, y = data()
    model = nn.Sequential(KeepsStatistics(*network()))
    model[0][4].eval()
    trainer(model).fit((x, y), progress=False)
    assert [m.training for m in model[0]] == [True, False, True, True, True]
    assert int(model[0][1].num_batches_tracked) == 0


def test_a_second_fit_goes_on_with_weights_and_optimizer():
    x, y = data()
    ours, theirs = (network(dropout=0) for _ in range(2))
    job = trainer(ours, optimizer="adam", lr=1e-2)
    first = job.fit((x, y), batch_size=32, epochs=1, progress=False)
    second = job.fit((x, y), batch_size=32, epochs=1, progress=False)
    plain = torch.optim.Adam(theirs.parameters(), lr=1e-2)
    for _ in range(2):
        plain_fit(theirs, plain, x, y, epochs=1)
    assert same(ours, theirs)
    assert second is not first
    assert job.history is second


def test_torchs_settings_are_as_before():
    x, y = data()
    before = (
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
    )
    # As auto may choose: a number of threads that no one asked for by name.
    asked = Recipe(compute=Compute(deterministic=True, matmul_precision="medium"))
    seen = []

    class Look(flatout.Callback):
        def on_step(self, state):
            torch.set_num_threads(2)
            now = torch.are_deterministic_algorithms_enabled()
            seen.append((now, torch.get_float32_matmul_precision()))

    trainer(network(), recipe=asked).fit((x, y), callbacks=[Look()], progress=False)
    assert set(seen) == {(True, "medium")}
    assert before == (
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
    )


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_an_explicit_half_precision_trains(precision):
    x, y = data()
    said = []
    half = Recipe(compute=Compute(precision=precision))
    job = trainer(network(), optimizer="adam", lr=1e-2, recipe=half, say=said.append)
    history = job.fit((x, y), batch_size=32, epochs=6, progress=False)
    loss = history.history["loss"]
    assert loss[-1] < 0.8 * loss[0]
    assert job.resolved.compute.precision == precision
    assert precision in job.resolved.summary()
    assert not any("bit-identical" in line for line in said)
    assert job.predict(x).dtype == torch.float32
    change = next(c for c in job.resolved.changes() if c.field == "compute.precision")
    assert change.parity == "rounding"
    assert change.ratio == ""  # nothing was measured, so no speed is claimed


def test_deterministic_trains_and_is_the_plain_result_here():
    x, y = data()
    ours, theirs = network(), network()
    torch.manual_seed(7)
    plain_fit(theirs, torch.optim.Adam(theirs.parameters()), x, y)
    torch.manual_seed(7)
    job = trainer(ours, recipe=Recipe(compute=Compute(deterministic=True)))
    job.fit((x, y), batch_size=32, epochs=2, progress=False)
    assert same(ours, theirs)


def test_save_and_load_and_safetensors_alone(tmp_path):
    x, y = data()
    model = network()
    job = trainer(model)
    job.fit((x, y), progress=False)
    path = job.save(tmp_path / "model.safetensors")
    assert path == tmp_path / "model.safetensors"
    other = network(seed=5)
    trainer(other).load(path)
    assert same(model, other)
    plain = network(seed=6)
    plain.load_state_dict(safetensors.torch.load_file(path))
    assert same(model, plain)


def test_loading_anothers_file_changes_nothing(tmp_path):
    path = trainer(nn.Linear(FEATURES := 4, 2)).save(tmp_path / "other.safetensors")
    model = network()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(CheckpointError, match="another model"):
        trainer(model).load(path)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    data_bytes = bytearray(path.read_bytes())
    data_bytes[-1] ^= 1
    path.write_bytes(data_bytes)
    with pytest.raises(CheckpointError, match="damaged"):
        trainer(nn.Linear(FEATURES, 2)).load(path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss": "crossentropy"}, "unknown loss 'crossentropy'; known: cross_entropy"),
        ({"optimizer": "lion"}, "unknown optimizer 'lion'; known: adam"),
        ({"optimizer": 3}, "an optimizer is an optimizer, its class or a name, found int"),
        ({"optimizer": lambda p: None}, "gave a NoneType, not a torch optimizer"),
        ({"metrics": ["acuracy"]}, "unknown metric 'acuracy'"),
        ({"schedule_every": "batch"}, "'step' or 'epoch', found 'batch'"),
        ({"scheduler": "cosine"}, "a scheduler is one of torch's"),
        ({"optimizer": torch.optim.LBFGS}, "LBFGS"),
    ],
)
def test_what_cannot_be_used_is_named_at_once(options, words):
    with pytest.raises(ModelError) as caught:
        flatout.Trainer(network(), **options)
    assert words in str(caught.value)


def test_what_is_no_module_is_named():
    with pytest.raises(ModelError, match=r"a model is a torch.nn.Module, found function"):
        flatout.Trainer(lambda x: x)
    with pytest.raises(ModelError, match="no parameter that can be trained"):
        flatout.Trainer(network().requires_grad_(False))


def test_an_optimizer_or_scheduler_of_something_else_is_named():
    other = torch.optim.Adam(network().parameters())
    with pytest.raises(ModelError, match="no parameter of this model"):
        flatout.Trainer(network(), optimizer=other)
    with pytest.raises(ModelError, match="scheduler belongs to another optimizer"):
        flatout.Trainer(network(), scheduler=lr_scheduler.ExponentialLR(other, 0.5))
    with pytest.raises(ModelError, match="lr was given together with an optimizer"):
        flatout.Trainer(network(), optimizer=other, lr=0.1)


def test_a_schedulers_class_is_made_with_the_optimizer():
    job = flatout.Trainer(network(), scheduler=lr_scheduler.ReduceLROnPlateau)
    assert isinstance(job.scheduler, lr_scheduler.ReduceLROnPlateau)
    assert job.scheduler.optimizer is job.optimizer


@pytest.mark.parametrize("overflows", [True, False])
def test_steps_that_overflow_in_fp16_are_counted_and_reported(overflows, tmp_path):
    half, said, factor = Recipe(compute=Compute(precision="fp16")), [], 1e9 if overflows else 1.0

    def loss(output, target):
        return F.cross_entropy(output, target) * factor

    def fit(epochs, **options):
        job = trainer(network(), recipe=half, loss=loss, run=tmp_path / "run", say=said.append)
        return job.fit(data(), batch_size=16, epochs=epochs, progress=False, **options)

    history = fit(1)
    steps = history.timeline.steps
    lines = [note for note in history.notes if note.startswith("fp16 has left out")]
    if not overflows:
        assert history.skipped_steps < 4
        assert lines == []
        return
    assert 4 <= history.skipped_steps <= steps
    assert f"fp16 has left out {history.skipped_steps} of {steps} steps" in lines[0]
    assert said.count(lines[0]) == 1
    assert history.as_dict()["skipped_steps"] == history.skipped_steps
    resumed = fit(2, resume=True)
    assert history.skipped_steps < resumed.skipped_steps


def plateau(**options):
    return lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5, **options)


def fit_on_plateau(scheduler, *, epochs=3, validation=True, **options):
    given = options.pop("fit", {})
    job = trainer(network(), scheduler=scheduler, metrics=["accuracy"], **options)
    if validation:
        given["validation_data"] = data()
    return job, job.fit(data(), batch_size=64, epochs=epochs, progress=False, **given)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "a smaller val_loss is better, but with mode='max' ReduceLROnPlateau would"),
        ({"validation": False}, "a smaller loss is better"),
        ({"monitor": "val_accuraccy"}, "did you mean 'val_accuracy'"),
    ],
)
def test_a_mode_that_does_not_fit_the_figure_is_refused_before_the_first_step(options, words):
    with pytest.raises(ModelError) as caught:
        fit_on_plateau(plateau(mode="max"), **options)
    assert words in str(caught.value)
    with pytest.raises(ModelError, match="a larger val_accuracy is better"):
        fit_on_plateau(plateau(mode="min"), monitor="val_accuracy")


def test_a_plateau_follows_the_figure_that_is_named():
    # No epoch after the first improves by 10.
    still = plateau(mode="max", threshold=10, threshold_mode="abs")
    job, _ = fit_on_plateau(still, monitor="val_accuracy", lr=1e-3)
    assert job.optimizer.param_groups[0]["lr"] == 1e-3 * 0.5**2
    assert job.scheduler.best <= 1  # best is an accuracy


def test_epochs_without_validation_do_not_count_for_a_plateau():
    job, history = fit_on_plateau(plateau(), epochs=4, fit={"validation_freq": 2})
    assert job.scheduler.last_epoch == 2
    assert job.scheduler.best == min(e["val_loss"] for e in history.epochs if "val_loss" in e)


def test_a_monitor_without_a_plateau_is_refused():
    with pytest.raises(ModelError, match="and none is given"):
        trainer(network(), monitor="val_accuracy")


@pytest.mark.parametrize("callback", [EarlyStopping, BestCheckpoint])
def test_callbacks_refuse_the_wrong_mode_of_a_figure_too(callback):
    with pytest.raises(ModelError, match="a smaller val_loss is better, but"):
        callback("val_loss", mode="max")
    with pytest.raises(ModelError, match="a larger accuracy is better"):
        callback("accuracy", mode="min")
    callback("val_heat_score", mode="min")  # the direction of a user's own figure is unknown


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_it_is_the_plain_loop_there():
    x, y = data()
    ours, theirs = network(), network().cuda()
    ours_with, theirs_with = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (ours, theirs))
    torch.manual_seed(7)
    plain_fit(theirs, theirs_with, x.cuda(), y.cuda(), epochs=3)
    torch.manual_seed(7)
    job = trainer(ours, optimizer=ours_with)
    job.fit((x, y), batch_size=32, epochs=3, progress=False)
    assert same(ours, theirs)
    assert job.predict(x).device.type == "cpu"


def test_what_is_printed_of_trainer_and_data():
    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1))
    model[0].requires_grad_(False)
    found = flatout.Trainer(model, optimizer="sgd", lr=0.1)
    assert repr(found) == "<Trainer: Sequential of 13 weights (3 train), SGD, lr 0.1>"
    made = flatout.data.arrays(torch.zeros(6, 4), torch.zeros(6).long())
    assert repr(made) == "Arrays(inputs float32 (6, 4), targets int64 (6,))"
    piped = made.shuffle(seed=1).map(close).batch(2, last="drop").repeat(3)
    stages = "shuffle(seed=1) → map(close) → batch(2, last='drop') → repeat(3)"
    assert repr(piped) == f"<Pipeline: arrays → {stages}>"
    asked = Recipe(compute=Compute(precision="bf16"))
    assert repr(asked) == str(asked) == "Recipe(compute.precision='bf16')"


@pytest.mark.parametrize("progress", [None, False])
def test_what_is_noted_while_training_is_said_once(capsys, progress):
    class Noting(flatout.Callback):
        def on_epoch_start(self, state):
            trainer.loop.note("a pipe has run dry")

    trainer = flatout.Trainer(nn.Linear(2, 2))
    x, y = torch.ones(8, 2), torch.zeros(8, dtype=torch.int64)
    history = trainer.fit((x, y), batch_size=4, callbacks=[Noting()], progress=progress)
    assert history.notes == ["a pipe has run dry"]
    said = capsys.readouterr()
    assert (said.out + said.err).count("a pipe has run dry") == 1
