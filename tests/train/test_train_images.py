"""From folders of images to a trained, saved, reloaded model: bytes are scaled on the way."""

import json
import math
import re
import shutil
import zipfile

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn
from train_jobs import quiet, same

import flatout
from flatout.data.batches.normalization import Normalization
from flatout.errors import DataError, NumbersError
from flatout.recipe import Compute, Memory, Process, Recipe
from flatout.save.export import export
from flatout.train.callbacks import BestCheckpoint

Image = pytest.importorskip("PIL.Image")

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def plain(memory_format="contiguous"):
    compute = Compute(
        precision="fp32",
        memory_format=memory_format,
        rewrites="off",
        fused_optimizer="off",
        matmul_precision="highest",
    )
    memory, process = Memory(micro_batch="whole"), Process(threads=1)
    return Recipe(compute=compute, memory=memory, process=process)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Dark and bright pictures of 9x8 pixels."""
    root = tmp_path_factory.mktemp("photos")
    draw = np.random.default_rng(0)
    for number in range(24):
        name, low = ("bright", 140) if number % 2 else ("dark", 0)
        (root / name).mkdir(exist_ok=True)
        pixels = draw.integers(low, low + 110, (9, 8, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(root / name / f"{number}.png")
    return root


def images(photos, **options):
    return flatout.data.images(photos, size=8, **options)


def network(*first):
    torch.manual_seed(0)
    return nn.Sequential(
        *first,
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 2),
    )


def trainer(model=None, memory_format="contiguous", **options):
    options = {"lr": 0.02, "metrics": ["accuracy"], "say": quiet, **options}
    return flatout.Trainer(model or network(), recipe=plain(memory_format), **options)


class Seen(nn.Module):
    """Keeps what it gets, as it is."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def forward(self, x):
        if x.dtype != torch.uint8:  # which the layers behind do not take
            self.kept.append(x)
        return x


def arrays_of(photos, normalization):
    """The same images as float32 in memory, as a user would make them."""
    batch = images(photos).batch(24).peek(1)[0]
    return normalization(batch.inputs), batch.targets


@pytest.mark.parametrize("written", [None, (MEAN, STD)])
def test_training_is_that_on_floats_bit_by_bit(photos, written):
    normalization = Normalization() if written is None else Normalization.of(*written)
    x, y = arrays_of(photos, normalization)
    theirs = trainer()
    arrays = flatout.data.arrays(x, y)
    theirs.fit(arrays.shuffle(seed=3).batch(8), validation_data=(x, y), epochs=2, progress=False)
    source = images(photos)
    train = source.shuffle(seed=3).batch(8)
    train = train if written is None else train.normalize(*written)
    lines = []
    ours = trainer(say=lines.append)
    ours.fit(train, validation_data=source, epochs=2, progress=False)
    assert same(ours.model, theirs.model)
    ours_logs, theirs_logs = (
        [{k: v for k, v in logs.items() if k != "seconds"} for logs in one.history.epochs]
        for one in (ours, theirs)
    )
    assert ours_logs == theirs_logs
    assert ours.evaluate(source) == theirs.evaluate(x, y)
    assert torch.equal(ours.predict(source), theirs.predict(x))
    (said,) = [line for line in lines if "uint8" in line]
    assert normalization.words() in said
    assert (".normalize(mean, std)" in said) == (written is None)


def test_what_was_learned_is_in_the_file_and_a_file_is_predicted_with_it(photos, tmp_path):
    job = trainer()
    job.fit(images(photos).shuffle(seed=3).batch(8).normalize(MEAN, STD), epochs=8, progress=False)
    job.save(tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        kept = json.loads(file.metadata()["flatout.signature"])
    assert (kept["mean"], kept["std"]) == (list(MEAN), list(STD))
    fresh = trainer()
    fresh.load(tmp_path / "model.safetensors")
    everything = job.predict(images(photos))
    file = photos / "bright" / "1.png"
    one = fresh.predict(str(file))
    # A batch of another size may be rounded by other kernels.
    torch.testing.assert_close(one[0], everything[0])
    assert fresh.classes[one[0].argmax()] == "bright"
    torch.testing.assert_close(fresh.predict([photos / "dark" / "0.png", str(file)])[1], one[0])
    assert torch.equal(fresh.predict(photos), everything)
    # Bytes that a user has read are the same images.
    pixels = images(photos, labels=False).batch(24).peek(1)[0].inputs
    assert torch.equal(fresh.predict(pixels), everything)
    assert fresh.evaluate(images(photos)) == job.evaluate(images(photos).normalize(MEAN, STD))
    with pytest.raises(DataError, match=r"(?s)scaled to 0..1, and the model.*leave normalize out"):
        fresh.evaluate(images(photos).normalize())
    with pytest.raises(DataError, match=r"absent.png"):
        fresh.predict("absent.png")


def test_the_best_weights_of_a_run_come_with_what_was_learned(photos, tmp_path):
    job = trainer(run=tmp_path)
    source = images(photos).batch(8).normalize(MEAN, STD)
    job.fit(source, callbacks=[BestCheckpoint("loss")], progress=False)
    fresh = trainer()
    assert re.search(r"safetensors, loss 0\.\d+$", fresh.load_best(tmp_path))  # the last, too
    assert fresh.classes == ("bright", "dark")
    # Not scaled to 0..1, as images of a model that nothing is known of are.
    assert torch.equal(fresh.predict(images(photos)), job.predict(images(photos)))
    assert fresh.predict(photos / "bright" / "1.png").shape == (1, 2)


def test_a_model_that_scales_for_itself_gets_bytes(photos, tmp_path):
    class Scales(nn.Module):
        def forward(self, x):
            assert x.dtype == torch.uint8
            return x.float() / 255

    lines = []
    job = trainer(network(Scales()), say=lines.append)
    state = torch.random.get_rng_state()
    job.fit(images(photos).batch(8), validation_data=images(photos), epochs=1, progress=False)
    assert torch.equal(state, torch.random.get_rng_state())
    assert not [line for line in lines if "uint8" in line]
    assert job.evaluate(images(photos))["accuracy"] >= 0
    job.save(tmp_path / "m.safetensors")
    again = trainer(network(Scales()))
    again.load(tmp_path / "m.safetensors")
    file = str(photos / "dark" / "0.png")
    assert torch.equal(again.predict(file), job.predict(file))


def test_functions_that_give_floats_decide_for_themselves(photos, tmp_path):
    def centered(x, y):
        return x.float() / 127.5 - 1, y

    seen = Seen()
    job = trainer(network(seen))
    train = images(photos).batch(8).map(centered)
    job.fit(train, epochs=1, progress=False)
    assert {x.dtype for x in seen.kept} == {torch.float32}
    assert min(float(x.min()) for x in seen.kept) < -0.9
    assert job.classes == ("bright", "dark")
    with pytest.raises(DataError, match=r"(?s)does not know how a file.*size=\.\.\., labels=False"):
        job.predict(str(photos / "dark" / "0.png"))
    with pytest.raises(DataError, match="float32"):
        trainer().fit(train.normalize(), epochs=1, progress=False)
    # Without the function the model must not get something else in silence.
    for ask in (job.evaluate, job.predict):
        with pytest.raises(DataError, match=r"(?s)trained on other inputs.*the functions"):
            ask(images(photos))
    with pytest.raises(DataError, match="trained on other inputs"):
        trainer().fit(train, validation_data=images(photos), progress=False)


def test_augmentation_is_no_part_of_what_a_file_becomes(photos):
    def flipped(x, y, rng):
        return (x.flip(-1) if rng.random() < 0.5 else x), y

    job = trainer()
    job.fit(images(photos).map(flipped).batch(8), epochs=1, progress=False)
    want = job.predict(images(photos))
    assert torch.equal(job.predict(str(photos)), want)


@pytest.mark.parametrize("memory_format", ["contiguous", "channels_last"])
def test_images_come_in_the_layout_that_was_chosen(photos, memory_format):
    seen = Seen()
    job = trainer(network(seen), memory_format)
    job.fit(images(photos).shuffle(seed=3).batch(8), epochs=1, progress=False)
    chosen = torch.channels_last if memory_format == "channels_last" else torch.contiguous_format
    assert all(x.is_contiguous(memory_format=chosen) for x in seen.kept[-2:])
    assert {x.dtype for x in seen.kept[-2:]} == {torch.float32}


def test_a_model_is_evaluated_before_it_was_trained(photos):
    x, y = arrays_of(photos, Normalization.of(MEAN, STD))
    job = trainer()
    assert job.evaluate(images(photos).normalize(MEAN, STD)) == trainer().evaluate(x, y)
    assert job.signature is None
    x, y = arrays_of(photos, Normalization())
    assert torch.equal(job.predict(images(photos)), trainer().predict(x))


def test_images_that_look_otherwise_than_in_training(photos):
    lines = []
    job = trainer(say=lines.append)
    job.fit(images(photos).batch(8), epochs=1, progress=False)
    with pytest.raises(DataError, match=r"(?s)have 1 channels.*channels=3"):
        job.evaluate(images(photos, channels=1))
    job.evaluate(flatout.data.images(photos, size=12, resize="crop"))
    assert lines[-1] == "input: images are 3x12x12 by crop, and were 3x8x8 in training"
    job.evaluate(images(photos))
    assert sum("in training" in line for line in lines) == 1
    for ask in (job.fit, job.evaluate):
        with pytest.raises(DataError, match=r"flatout\.data\.images\(path, size=224\)"):
            ask(str(photos))


def test_mixed_images_and_images_in_memory_are_scaled_too(photos):
    mixed = flatout.data.mix(images(photos), images(photos))
    seen = Seen()
    trainer(network(seen)).fit(mixed.batch(8), epochs=1, progress=False)
    pixels = images(photos).batch(24).peek(1)[0]
    arrays = flatout.data.arrays(pixels.inputs, pixels.targets).normalize(0.5, 0.5).batch(8)
    trainer(network(seen)).fit(arrays, epochs=1, progress=False)
    assert min(float(x.min()) for x in seen.kept) < -0.9
    assert max(float(x.max()) for x in seen.kept) <= 1
    with pytest.raises(DataError, match=r"\.normalize\(\)"):
        trainer().fit((pixels.inputs, pixels.targets), epochs=1, progress=False)


def test_a_bad_number_is_still_explained(photos):
    class Breaks(nn.Module):
        def forward(self, x):
            return x if x.dtype == torch.uint8 else x / 0

    with pytest.raises(NumbersError, match="step 1"):
        trainer(network(Breaks())).fit(images(photos).batch(8), epochs=1, progress=False)


def test_other_images_with_the_same_model_are_normalized_again(photos):
    job = trainer()
    job.fit(images(photos).batch(8), epochs=1, progress=False)
    assert job.signature.pixels == Normalization()
    job.fit(images(photos).batch(8).normalize(MEAN, STD), epochs=1, progress=False)
    assert job.signature.pixels == Normalization(MEAN, STD)


# -- Keras -----------------------------------------------------------------------------------------


def keras_model(*first, loss="sparse_categorical_crossentropy"):
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "torch":
        pytest.skip("Keras is on another backend")
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((8, 8, 3)),
            *(getattr(layers, name)(*args) for name, *args in first),
            layers.Conv2D(4, 3, activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(2, activation="softmax"),
        ]
    )
    if loss is not None:
        model.compile("adam", loss, metrics=["accuracy"])
    return model


def keras_trainer(model, **options):
    return flatout.Trainer(model, recipe=plain(), **{"say": quiet, **options})


@pytest.mark.parametrize("written", [None, (MEAN, STD)])
def test_a_keras_model_gets_images_as_it_wants_them(photos, tmp_path, written):
    keras = pytest.importorskip("keras")
    normalization = Normalization() if written is None else Normalization.of(*written)
    x, y = arrays_of(photos, normalization)
    x, y = x.permute(0, 2, 3, 1).numpy(), y.numpy()
    theirs, ours = keras_trainer(keras_model()), keras_trainer(keras_model())
    theirs.fit(x, y, batch_size=8, shuffle=False, validation_data=(x, y), verbose=0)
    train = images(photos).batch(8)
    train = train if written is None else train.normalize(*written)
    history = ours.fit(train, validation_data=images(photos).batch(8), verbose=0)
    assert history.history == theirs.history.history
    assert ours.evaluate(images(photos)) == theirs.evaluate(x, y)
    want = theirs.predict(x)
    np.testing.assert_array_equal(ours.predict(images(photos)), want)
    file = str(photos / "bright" / "1.png")
    for name in ("m.keras", "m.weights.h5", "m.safetensors"):
        ours.save(tmp_path / name)
        again = keras_trainer(keras_model())
        again.load(tmp_path / name)
        assert again.classes == ("bright", "dark")
        np.testing.assert_allclose(again.predict(file)[0], want[0], rtol=1e-5)
        assert (
            again.evaluate(images(photos))["accuracy"] == ours.evaluate(images(photos))["accuracy"]
        )
    for name, target in (
        ("m.keras", "x.safetensors"),
        ("m.keras", "x.keras"),
        ("m.weights.h5", "y.safetensors"),
        ("m.weights.h5", "y.weights.h5"),
    ):
        export(tmp_path / name, tmp_path / target, overwrite=True)
        again = keras_trainer(keras_model())
        if target != "y.safetensors":  # whose names are those of the file
            again.load(tmp_path / target)
            assert again.classes == ("bright", "dark")
    with safe_open(tmp_path / "y.safetensors", "pt") as file:
        assert "bright" in file.metadata()["flatout.signature"]
        assert not [key for key in file.keys() if "flatout" in key]  # noqa: SIM118
    # Keras reads its own files as before.
    np.testing.assert_array_equal(
        keras.saving.load_model(tmp_path / "m.keras").get_weights()[0], ours.model.get_weights()[0]
    )
    bare = keras_model()
    bare.load_weights(tmp_path / "m.weights.h5")
    np.testing.assert_array_equal(bare.get_weights()[0], ours.model.get_weights()[0])
    with zipfile.ZipFile(tmp_path / "m.keras") as archive:
        assert "bright" in archive.read("flatout.json").decode()


def test_a_keras_model_that_rescales_gets_bytes(photos):
    lines = []
    ours = keras_trainer(keras_model(("Rescaling", 1 / 255)), say=lines.append)
    theirs = keras_trainer(keras_model(("Rescaling", 1 / 255)))
    pixels = images(photos).batch(24).peek(1)[0]
    x = pixels.inputs.permute(0, 2, 3, 1).contiguous().numpy()
    theirs.fit(x, pixels.targets.numpy(), batch_size=8, shuffle=False, verbose=0)
    ours.fit(images(photos).batch(8), verbose=0)
    assert ours.history.history == theirs.history.history
    assert not [line for line in lines if "uint8" in line]


def test_a_keras_model_that_is_not_compiled(photos, tmp_path):
    job = keras_trainer(keras_model(loss=None), loss="nll", lr=0.01)
    job.fit(images(photos).batch(8), epochs=1, progress=False)
    job.save(tmp_path / "m.keras")
    again = keras_trainer(keras_model(loss=None), loss="nll")
    again.load(tmp_path / "m.keras")
    assert again.classes == ("bright", "dark")
    assert again.predict(str(photos / "dark" / "0.png")).shape == (1, 2)


class Evaluates(flatout.Callback):
    """After each epoch on arrays, which are in the model's own layout."""

    def __init__(self, x, y):
        self.data, self.found = (x, y), []

    def on_epoch_end(self, state):
        self.found.append(state.trainer.evaluate(*self.data)["loss"])
        state.trainer.predict(self.data[0])


@pytest.mark.parametrize("compiled", [True, False])
def test_a_callback_evaluates_other_inputs_than_those_of_training(photos, compiled):
    x, y = arrays_of(photos, Normalization())
    x, y = x.permute(0, 2, 3, 1).numpy(), y.numpy()
    model = keras_model() if compiled else keras_model(loss=None)
    job = keras_trainer(model, **({} if compiled else {"loss": "nll", "lr": 0.01}))
    callback = Evaluates(x, y)
    quiet = {"verbose": 0} if compiled else {"progress": False}
    history = job.fit(
        images(photos).batch(8), epochs=2, validation_data=(x, y), callbacks=[callback], **quiet
    )
    assert callback.found == history.history["val_loss"]


def test_images_that_are_skipped_are_counted_and_named_once(photos, tmp_path):
    """Whether they were bad from the start or became so while training, or are in validation."""
    for part in ("train", "val"):
        shutil.copytree(photos, tmp_path / part)
    (tmp_path / "val/dark/0.png").write_bytes(b"no image")
    said = []
    job = trainer(say=said.append)
    train, val = (
        flatout.data.images(tmp_path / part, size=8, on_error="skip").shuffle(seed=1).batch(1)
        for part in ("train", "val")
    )

    class Damage(flatout.Callback):
        def on_epoch_end(self, state):
            if state.epoch == 1:
                for name in ("dark/2.png", "bright/1.png"):
                    path = tmp_path / "train" / name
                    path.write_bytes(path.read_bytes()[:-30])
                Image.new("RGB", (90, 40)).save(tmp_path / "train/dark/4.png")
                (tmp_path / "val/dark/6.png").unlink()

    history = job.fit(train, validation_data=val, epochs=4, progress=False, callbacks=[Damage()])
    assert all(math.isfinite(epoch["loss"]) for epoch in history.epochs)
    told = [line for line in said if "skipped" in line]
    assert [line for line in history.notes if "skipped" in line] == told
    named = [
        ("1 bad row", ["val/dark/0.png"]),
        ("3 bad rows", ["train/dark/2.png", "train/bright/1.png", "train/dark/4.png"]),
        ("1 more bad row", ["val/dark/6.png"]),
    ]
    for line, (count, names) in zip(told, named, strict=True):
        assert line.startswith(f"input: {count} skipped: ")
        assert all(line.count(name) == 1 for name in names)

    said.clear()
    outputs = job.predict(val)
    assert len(outputs) == 22
    assert not any("skipped" in line for line in said)
    (tmp_path / "val/dark/8.png").unlink()
    job.evaluate(val)
    (line,) = (line for line in said if "skipped" in line)
    assert line.startswith("input: 1 more bad row skipped: ")
    assert line.count("val/dark/8.png") == 1
