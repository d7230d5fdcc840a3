"""A fit whose frozen layers are computed once learns what it learns without."""

import os
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from train_cuts import SequentialCut
from train_frozen import fitted, frozen, images, watched_cuts, written
from train_jobs import figures, quiet, same

import flatout
from flatout.data.sources.images.image_rows import ImageRows
from flatout.errors import DataError
from flatout.measure import Profile
from flatout.models import Contents, find_cuts
from flatout.recipe import Recipe
from flatout.train.explanation import Explanation
from flatout.train.graphs.capture_graph import ModuleWatch
from flatout.train.parts.features import costs as feature_costs
from flatout.train.parts.features import features as kept
from flatout.train.parts.features.choice import Choice
from flatout.train.terms import Terms
from flatout.train.tuning import auto
from flatout.train.tuning import first_check as auto_check

# Terms by which frozen layers are examined after a first epoch of any length.
LOOKS = Terms(has_bf16_units=lambda device: True, least_frozen_s=0)


@pytest.fixture(autouse=True)
def made(monkeypatch):
    """All cuts that fits have looked at; the last that pays is chosen, however short the run."""
    return watched_cuts(monkeypatch)


def test_the_result_is_that_without(made):
    x, y = images()
    plain, expected = fitted("off", validation_data=(x[:20], y[:20]))
    trainer, history = fitted("memory", validation_data=(x[:20], y[:20]))
    assert same(trainer.model, plain.model)
    assert figures(history) == figures(expected)
    assert history.features["kept"]["name"] == "behind 5 (Flatten)"
    # A few for looking, then each training sample and each validation sample once.
    assert made[-1].computed <= 50 + 20 + 10 + 1


@pytest.mark.slow
def test_a_file_of_many_rows_that_is_replaced_while_training_is_noticed(tmp_path, made):
    """Though no row is read from it any more."""
    data = written(tmp_path)
    path = Path(data.origin.files[0].path)

    class Replace(flatout.Callback):
        def on_epoch_end(self, state):
            if state.epoch == 1:
                was = path.stat()
                path.write_bytes(path.read_bytes())
                os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
                time.sleep(1.1)  # it is looked at once in a second

    with pytest.raises(DataError, match="replaced or written while features") as error:
        fitted("memory", data, epochs=4, callbacks=[Replace()])
    assert error.value.where == str(path)
    assert made[-1].computed <= 30 + 10 + 4


def test_the_model_is_left_as_it_was():
    trainer, _ = fitted("memory")
    assert "_call_impl" not in vars(trainer.model)
    x, y = images()
    trainer.evaluate((x, y))


def test_bf16_rows_stay_within_rounding():
    plain, _ = fitted("off", precision="bf16")
    trainer, _ = fitted("memory", precision="bf16")
    for ours, theirs in zip(trainer.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-3)


def counted(weight):
    with torch.no_grad():
        weight.mul_(2)


def uncounted(weight):
    """Past torch's count of its changes."""
    weight.data.mul_(2)


@pytest.mark.slow
@pytest.mark.parametrize("double", [counted, uncounted])
def test_layers_that_a_callback_changes_are_computed_again(made, double):
    class Change(flatout.Callback):
        def on_epoch_end(self, state):
            if state.epoch == 1:
                double(state.trainer.model[0].weight)

    said = []
    plain, expected = fitted("off", epochs=4, callbacks=[Change()])
    trainer, history = fitted("memory", epochs=4, callbacks=[Change()], say=said.append)
    assert sum("have changed" in line for line in said) == 1
    assert same(trainer.model, plain.model)
    assert figures(history) == figures(expected)


class ChangeInAnEpoch(flatout.Callback):
    every = 7

    def on_step(self, state):
        if state.step == 7:
            with torch.no_grad():
                state.trainer.model[0].weight.mul_(2)


def test_batches_made_of_rows_are_made_again_after_a_change(tmp_path):
    data = written(tmp_path)
    plain, expected = fitted("off", data, callbacks=[ChangeInAnEpoch()])
    trainer, history = fitted("disk", data, callbacks=[ChangeInAnEpoch()])
    assert same(trainer.model, plain.model)
    assert figures(history) == figures(expected)


class DoubleUncounted(flatout.Callback):
    """In the first epoch, once."""

    every = 1

    def on_step(self, state):
        if state.step == 2:
            uncounted(state.trainer.model[0].weight)


def test_nothing_is_kept_of_layers_that_were_changed_unnoticed(tmp_path, monkeypatch):
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(Contents, "seem_same", lambda self: True)  # until the next epoch
    data = written(tmp_path)
    fitted("disk", data, callbacks=[DoubleUncounted()])
    plain, _ = fitted("off", data)
    trainer, history = fitted("disk", data)
    assert history.features["kept"]["filled"] > 0
    assert same(trainer.model, plain.model)


def test_a_second_fit_with_another_rate_computes_nothing(tmp_path, made, monkeypatch):
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))
    data = written(tmp_path)
    fitted("disk", data)
    first = made[-1].computed
    plain, expected = fitted("off", data, lr=0.02)
    trainer, history = fitted("disk", data, lr=0.02)
    looked = made[-1].computed
    assert looked <= 2 + 2 + 1 < first
    assert same(trainer.model, plain.model)
    assert figures(history) == figures(expected)


def test_another_head_finds_what_was_kept(tmp_path, made, monkeypatch):
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))
    data = written(tmp_path)
    fitted("disk", data)

    def other():
        model = frozen()
        model[6] = nn.Sequential(nn.Linear(72, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 5))
        return model

    plain, expected = fitted("off", data, model=other())
    trainer, history = fitted("disk", data, model=other())
    assert made[-1].computed <= 2 + 2 + 1
    assert same(trainer.model, plain.model)
    assert figures(history) == figures(expected)


def test_settings_are_tuned_first(made):
    terms = Terms(least_frozen_s=1e9, longest_s=1e9, before_share=1e9)  # on a busy machine too
    x, y = images(200)
    trainer, history = fitted("memory", (x, y), epochs=12, precision="auto", terms=terms)
    assert history.features["kept"] is not None
    assert history.tuning["done"] or "features" in history.tuning["why"]
    assert trainer.resolved.input.features == "memory"


@pytest.mark.slow
@pytest.mark.parametrize("layer", ["3", "8"])
def test_settings_are_searched_again_at_a_thaw(layer, monkeypatch, made):
    """Behind the cut only those that do not change what is kept; where the cut moves, all."""
    asked = []
    resolve = auto.resolve

    def seen(requested, *given):
        asked.append(requested)
        return resolve(requested, *given)

    def fit(where):
        model = frozen().append(nn.ReLU()).append(nn.Linear(3, 3).requires_grad_(False))
        thaw = flatout.Unfreeze(14, layer)  # when features are kept
        return fitted(where, model=model, epochs=24, precision="auto", callbacks=[thaw])[0]

    plain = fit("off")
    monkeypatch.setattr(auto, "resolve", seen)
    trainer = fit("memory")
    assert len(asked) == 2
    free = [asked[1].get(f"compute.{name}") == "auto" for name in ("precision", "memory_format")]
    assert free == [layer == "3"] * 2
    assert asked[1].compute.fused_optimizer == "auto"
    for ours, theirs in zip(trainer.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=2e-2)


@pytest.mark.parametrize("epochs", [2, 30])  # too short to try settings, and with short epochs
def test_a_few_samples_choose_the_precision_of_rows_that_are_kept_from_the_start(
    epochs, monkeypatch, made
):
    rates = {0: (1.0, 0.1), 1: (0.5, 0.1), 2: (0.6, 0.1)}  # by how many options are on
    monkeypatch.setattr(
        auto_check.FirstCheck,
        "frozen_rates",
        lambda check, tried, *given: {one: rates[len(one)] for one in ((), *tried)},
    )
    trainer, history = fitted(
        "memory", images(200), batch_size=20, epochs=epochs, precision="auto", terms=LOOKS
    )
    assert trainer.resolved.compute.precision == "bf16"
    assert " a sample in bf16" in history.features["line"]
    assert history.tuning is None
    assert made[-1].computed <= 200 + 10 + 4


def test_the_next_run_finds_the_rows_whatever_a_few_samples_tell_it(tmp_path, monkeypatch, made):
    data = written(tmp_path, 200)
    for fast in ({0: (1.0, 0.1), 1: (0.5, 0.1), 2: (0.6, 0.1)}, {0: (1.0, 0.1), 1: (0.9, 0.1)}):
        monkeypatch.setattr(
            auto_check.FirstCheck,
            "frozen_rates",
            lambda check, tried, *given, fast=fast: {
                one: fast[len(one)] for one in ((), *tried) if len(one) in fast
            },
        )
        trainer, _ = fitted("disk", data, batch_size=20, epochs=4, precision="auto", terms=LOOKS)
        first, looked = made[0].computed, made[-1].computed
        assert trainer.resolved.compute.precision == "bf16"
    assert looked <= 2 + 2 + 1 < first


def test_what_makes_the_forward_slower_is_not_chosen(monkeypatch):
    rates = {0: (1.0, 0.9), 1: (1.1, 0.1), 2: (1.2, 0.1)}
    monkeypatch.setattr(
        auto_check.FirstCheck,
        "frozen_rates",
        lambda check, tried, *given: {one: rates[len(one)] for one in ((), *tried)},
    )
    trainer, _ = fitted(
        "memory", images(200), batch_size=20, epochs=2, precision="auto", terms=LOOKS
    )
    assert trainer.resolved.compute.precision == "fp32"


def test_samples_are_looked_at_once_for_the_precision(monkeypatch):
    """In a short run of short epochs, most of which is no forward of frozen layers."""
    looks = []

    def rates(check, tried, *given):
        looks.append(tried)
        return dict.fromkeys(((), *tried), (1.0, 2.0))

    monkeypatch.setattr(auto_check.FirstCheck, "frozen_rates", rates)
    fitted("memory", images(200), batch_size=20, epochs=2, precision="auto", terms=LOOKS)
    assert len(looks) == 1


@pytest.mark.parametrize("balanced", [False, True])
def test_flips_are_kept_each_and_drawn_as_without(tmp_path, made, balanced):
    data = written(tmp_path).augment(flip="horizontal")
    data = data.balance("over") if balanced else data  # each time that a row comes by itself
    plain, expected = fitted("off", data, epochs=5)
    trainer, history = fitted("memory", data, epochs=5)
    if balanced:  # parts of batches round otherwise; another draw would differ by 1e-4
        pairs = zip(trainer.model.parameters(), plain.model.parameters(), strict=True)
        assert all(torch.allclose(one, other, atol=1e-7) for one, other in pairs)
    else:
        assert same(trainer.model, plain.model)
        assert figures(history) == figures(expected)
    assert history.features["kept"]["variants"] == 2
    assert made[-1].computed <= 60 + 10 + 4


def noise(x, y, rng):
    return x + float(rng.random()), y


def test_what_is_random_is_not_kept_and_said_why(tmp_path):
    said = []
    data = written(tmp_path).map(noise)
    _, history = fitted("memory", data, say=said.append, progress=True)
    assert history.features["kept"] is None
    assert sum("features: nothing kept: map noise is random" in line for line in said) == 1
    lines = Explanation(history.as_dict(), None).lines()
    assert "features: nothing kept: map noise is random" in lines


@pytest.mark.slow
def test_settings_are_tried_where_samples_are_random(tmp_path):
    terms = Terms(least_frozen_s=0, longest_s=1e9, before_share=1e9)
    said = []
    data = written(tmp_path, 100).map(noise)
    _, history = fitted("auto", data, epochs=12, precision="auto", say=said.append, terms=terms)
    assert not any("kept from the start" in line for line in said)
    assert history.tuning is not None


def test_pixels_are_kept_where_samples_are_drawn_without_end(tmp_path, monkeypatch):
    for number in range(20):
        folder = tmp_path / "ab"[number % 2]
        folder.mkdir(exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (12, 12), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    decoded = []
    take = ImageRows.take
    monkeypatch.setattr(
        ImageRows, "take", lambda own, at, *rest: decoded.extend(at) or take(own, at, *rest)
    )
    data = flatout.data.images(tmp_path, channels=1).shuffle(seed=1)
    data = data.augment(crop=12, padding=2).batch(10)
    plain, expected = fitted("off", data, epochs=9)
    before = len(decoded)
    trainer, history = fitted("auto", data, epochs=9)
    assert history.features["kept"]["name"] == "decoded pixels"
    assert "views=K" in history.features["line"]
    assert same(trainer.model, plain.model)
    assert figures(history) == figures(expected)
    assert len(decoded) - before < before


def test_that_the_disk_is_full_is_said_once_for_training_and_validation(monkeypatch):
    monkeypatch.setattr("flatout.data.features.kept_rows.disk_room", lambda: 5 * 288)
    trainer, history = fitted("disk", validation_data=images(20))
    plain, expected = fitted("off", validation_data=images(20))
    assert sum("has no room for more" in line for line in history.notes) == 1
    assert same(trainer.model, plain.model)
    assert figures(history) == figures(expected)


def test_why_nothing_is_kept_of_an_iterable_is_said_at_once():
    x, y = images(30)
    told = []
    _, history = fitted("auto", list(zip(x.split(10), y.split(10), strict=True)), say=told.append)
    assert sum("how many samples" in line for line in [*told, *history.notes]) == 1
    assert history.features["kept"] is None


def test_nothing_is_said_where_nothing_is_frozen():
    said = []
    model = frozen().requires_grad_(True)
    _, history = fitted("auto", model=model, say=said.append)
    assert history.features is None
    assert not any("features" in line for line in said)


def test_exact_bits_keep_nothing():
    x, y = images()
    trainer = flatout.Trainer(frozen(), optimizer="sgd", lr=0.1, allow="exact", say=quiet)
    history = trainer.fit(x, y, epochs=3, progress=False)
    assert "exact" in history.features["why"]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.block = nn.Conv2d(8, 8, 3, padding=1)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.stem(x)
        return self.head(self.drop((self.block(x) + x).mean((2, 3))))


def test_a_skip_and_dropout_behind_the_frozen_part(monkeypatch):
    monkeypatch.setattr(kept, "find_cuts", find_cuts)
    found = []
    for where in ("off", "memory"):
        torch.manual_seed(3)
        model = flatout.freeze(Net(), until="stem")
        found.append(fitted(where, model=model))
    (plain, expected), (trainer, history) = found
    assert "stem" in history.features["kept"]["name"]
    assert same(trainer.model, plain.model)
    assert figures(history) == figures(expected)


class Towers(nn.Module):
    """An image tower whose results shrink, and a text tower whose results are more than its ids."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.image = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(inplace=True), nn.MaxPool2d(5))
        self.words, self.drop = nn.Embedding(20, 64), nn.Dropout(0.1)
        self.head = nn.Linear(8 * 4 + 64, 3)

    def forward(self, image, words):
        read = self.words(words).tanh().flatten(1, 2)[:, :64]
        return self.head(self.drop(torch.cat([self.image(image).flatten(1), read], 1)))


def test_two_towers_are_each_kept_at_their_own_depth(monkeypatch):
    monkeypatch.setattr(kept, "find_cuts", find_cuts)
    x, y = images()
    words = torch.randint(0, 20, (len(x), 5), generator=torch.Generator().manual_seed(1))
    found = []
    for where in ("off", "memory"):
        model = Towers()
        model.image.requires_grad_(False)
        model.words.requires_grad_(False)
        found.append(fitted(where, ((x, words), y), model=model))
    (plain, expected), (trainer, history) = found
    assert history.features["kept"]["bytes"] == 8 * 4 * 4 + 5 * 8
    assert "input 2" in history.features["kept"]["name"]
    assert same(trainer.model, plain.model)
    assert figures(history) == figures(expected)


def test_a_layer_that_could_be_frozen_is_named(monkeypatch):
    monkeypatch.setattr(kept, "find_cuts", find_cuts)
    model = flatout.freeze(Net(), until="stem.0")
    model.stem.requires_grad_(False)
    _, history = fitted("memory", model=model)
    assert "more could be kept: stem.1 (BatchNorm2d)" in history.features["line"]


def test_a_recorded_step_is_none_of_another_cut():
    """Though what is kept may have the same shape."""
    model = frozen()
    cut = find_cuts(model, images()[0][:4]).cuts[0]
    undo = cut.apply()
    watch = ModuleWatch([model])
    assert watch.holds()
    undo()
    assert not watch.holds()
    cut.apply()
    assert not watch.holds()


def test_cuts_differ_in_what_is_computed_behind_them(monkeypatch):
    """Not by the noise in the time of a long front; what is frozen there has no backward."""
    seconds = {("prefix", 6): 40, ("rest", 6): 4, ("prefix", 3): 20, ("rest", 3): 20}
    later, plain = [], []

    def cuts(model, inputs, most):
        both = [SequentialCut(model, count, inputs) for count in (6, 3)]
        return SimpleNamespace(cuts=both, hindrance="", at=lambda places: [])

    def timed(run, device):
        cut = getattr(run.func, "__self__", None)
        own = (run.func.__name__, len(cut.place)) if isinstance(cut, SequentialCut) else ""
        return float(seconds.get(own, 0)), run()

    def choose(options, samples, epochs, plain_s):
        later.extend(plain_s - option.saved_s for option in options)
        plain.append(plain_s)
        return Choice(None, "nothing kept: tried out")

    for name, own in {"find_cuts": cuts, "timed": timed, "choose": choose}.items():
        monkeypatch.setattr(kept, name, own)
    monkeypatch.setattr(kept, "making_s", lambda source: 0.5)
    fitted("memory")
    assert later == pytest.approx([1 + 2 * 1, 5 + 2 * 1])  # of each of four samples
    assert plain == [pytest.approx(0.5 + (11 + 10) / 2 + 2 * 1)]


def test_a_store_that_memory_cannot_hold_is_read_at_the_rate_of_the_disk(monkeypatch):
    monkeypatch.setattr(feature_costs, "disk_rate", lambda data: 123.0)
    assert feature_costs.read_rate("disk", 2**60) == 123.0
    assert feature_costs.read_rate("disk", 1000) > 1e6 < feature_costs.read_rate("memory", 2**60)
    monkeypatch.undo()
    assert feature_costs.disk_rate(bytes(1 << 16)) > 0


@pytest.mark.parametrize("compiled", [True, False])
def test_keras_models_keep_features_too(monkeypatch, compiled):
    keras = pytest.importorskip("keras")
    monkeypatch.setattr(kept, "find_cuts", find_cuts)
    x, y = images()
    x = x.permute(0, 2, 3, 1).contiguous()
    given = {"epochs": 3, "batch_size": 10, "validation_data": (x[:20], y[:20])}
    found = []
    for where in ("off", "memory"):
        keras.utils.set_random_seed(0)
        base = keras.Sequential(
            [keras.layers.Input((12, 12, 1)), keras.layers.Conv2D(4, 3, activation="relu")]
        )
        base.trainable = False
        inputs = keras.layers.Input((12, 12, 1))
        behind = keras.layers.Dropout(0.2)(keras.layers.Flatten()(base(inputs)))
        model = keras.Model(inputs, keras.layers.Dense(3)(behind))
        recipe = Recipe(input={"features": where}, compute={"precision": "fp32"})
        if compiled:
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(optimizer="sgd", loss=loss)
            trainer = flatout.Trainer(model, recipe=recipe, say=quiet)
        else:
            trainer = flatout.Trainer(model, optimizer="sgd", lr=0.01, recipe=recipe, say=quiet)
        torch.manual_seed(1)
        found.append((model, trainer.fit(x, y, verbose=0, **given)))
    (plain, expected), (model, history) = found
    assert history.features["kept"] is not None
    for ours, theirs in zip(model.get_weights(), plain.get_weights(), strict=True):
        assert np.allclose(ours, theirs, atol=1e-6)
    losses = [[one["loss"] for one in each.epochs] for each in (history, expected)]
    assert np.allclose(*losses, atol=1e-5)


def test_steps_are_not_measured_where_features_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("FLATOUT_PROFILE_BATCHES", "1")
    recipe = Recipe(input={"features": "memory"})
    trainer = flatout.Trainer(frozen(), optimizer="sgd", recipe=recipe, run=tmp_path, say=quiet)
    trainer.fit(images(), batch_size=10, epochs=3, progress=False)
    found = Profile.read(tmp_path)
    assert found.step_times == found.ranks_on_host == []
    assert any("not measured: features of frozen layers are kept" in note for note in found.notes)
