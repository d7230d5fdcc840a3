"""What frozen layers give is kept on a GPU too, with the result of the plain path."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import flatout
from flatout.data import RowPart, sample_names
from flatout.data.features.device_rows import features_give_way
from flatout.data.features.key import hashed
from flatout.data.features.store import NamedStore
from flatout.models import Contents, Cut
from flatout.recipe import Recipe
from flatout.train.parts.features import choice as frozen_choice
from flatout.train.parts.features import features
from flatout.train.parts.features.choice import Choice

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(60)]

SAMPLES, BATCH = 64, 16


@pytest.fixture(autouse=True)
def alike(monkeypatch):
    """The same kernels for each batch of a size."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


@pytest.fixture(autouse=True)
def chosen(monkeypatch):
    """The cut that keeps the fewest bytes is chosen, however short the run."""

    def choose(options, samples, epochs, plain_s):
        best = min(options, key=lambda one: one.bytes)
        return Choice(best, "", plain_s, plain_s / 10, 2, best.bytes * samples * best.variants)

    monkeypatch.setattr(features, "choose", choose)


@pytest.fixture
def computed(monkeypatch):
    """Of how many samples what is before a cut was computed, in each epoch, the looks included."""
    counts = [0]
    prefix = Cut.prefix

    def counted(cut, inputs):
        counts[-1] += len(inputs)
        return prefix(cut, inputs)

    monkeypatch.setattr(Cut, "prefix", counted)
    return counts


class Count(flatout.Callback):
    """Begins another count at the end of an epoch."""

    def __init__(self, counts):
        self.counts = counts

    def on_epoch_end(self, state):
        self.counts.append(0)


def network():
    """Layers of which the convolutions are frozen."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(256, 32),
        nn.ReLU(),
        nn.Linear(32, 3),
    )
    return flatout.freeze(model, until="6")


def images(samples=SAMPLES):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 3, 16, 16, generator=draw)
    return x, torch.randint(0, 3, (samples,), generator=draw)


def trainer_of(model, device, where, precision="fp32", **options):
    recipe = Recipe(
        input={"features": where},
        compute={"precision": precision},
        world={"device": device.type},
    )
    given = {"optimizer": "sgd", "lr": 0.05, "metrics": ["accuracy"], **options}
    return flatout.Trainer(model, recipe=recipe, say=lambda line: None, **given)


def fitted(device, where, data=None, *, model=None, counts=None, precision="fp32", **options):
    trainer = trainer_of(network() if model is None else model, device, where, precision)
    given = {"batch_size": BATCH, "epochs": 3, "progress": False, **options}
    given["callbacks"] = [*options.get("callbacks", ()), *([Count(counts)] if counts else ())]
    if isinstance(data, (DataLoader, flatout.data.Pipeline)):
        del given["batch_size"]
    return trainer, trainer.fit(images() if data is None else data, **given)


def losses(history):
    return [epoch["loss"] for epoch in history.epochs]


def check_alike(one, other, bound):
    """Weights and losses of two fits."""
    (ours, history), (plain, expected) = one, other
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(
            ours.model.state_dict()[name], value, rtol=bound, atol=bound, msg=name
        )
    assert losses(history) == pytest.approx(losses(expected), rel=max(bound, 1e-12))


@pytest.mark.parametrize(("precision", "bound"), [("fp32", 0), ("bf16", 2e-2)])
def test_a_fit_learns_what_it_learns_without(device, monkeypatch, computed, precision, bound):
    """Bit for bit where kernels do not depend on the batch: its size never changes here."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    x, y = images()
    given = {"precision": precision, "validation_data": (x[:32], y[:32])}
    plain = fitted(device, "off", **given)
    ours = fitted(device, "memory", counts=computed, **given)
    assert next(ours[0].model.parameters()).device.type == device.type
    assert ours[1].features["kept"]["name"] == "behind 6 (Flatten)"
    assert computed[0] >= SAMPLES
    assert computed[1:3] == [0, 0]
    check_alike(ours, plain, bound)


@pytest.mark.parametrize("where", ["in memory", "on the device"])
def test_ragged_batches_and_tf32_stay_within_rounding(device, computed, where):
    data = images(SAMPLES + 5)
    if where == "on the device":
        data = tuple(part.to(device) for part in data)
    plain = fitted(device, "off", data)
    ours = fitted(device, "memory", data, counts=computed)
    assert computed[1:3] == [0, 0]
    check_alike(ours, plain, 1e-2)


def test_the_next_run_finds_the_rows_and_so_does_another_head(device, computed):
    data = images(10 * BATCH)  # more than a run looks at to decide
    fitted(device, "disk", data)
    assert computed[-1] >= 10 * BATCH
    computed.append(0)
    fitted(device, "disk", data)
    assert computed[-1] < 10 * BATCH
    other = nn.Sequential(*network()[:7], nn.Linear(256, 3))
    computed.append(0)
    fitted(device, "disk", data, model=other)
    assert computed[-1] < 10 * BATCH
    with torch.no_grad():
        other[0].weight.mul_(2)
    computed.append(0)
    fitted(device, "disk", data, model=other)
    assert computed[-1] >= 10 * BATCH


def test_rows_of_a_gpu_are_computed_again_on_a_cpu(device, computed):
    """Their rounding differs, so the key does."""
    if device.type == "cpu":
        pytest.skip("the device is the CPU")
    fitted(device, "disk")
    computed.append(0)
    trainer, _ = fitted(torch.device("cpu"), "disk")
    assert next(trainer.model.parameters()).device.type == "cpu"
    assert computed[-1] >= SAMPLES


def test_evaluate_and_predict_take_what_a_fit_has_kept(device, computed):
    trainer, _ = fitted(device, "memory")
    plain = trainer_of(network(), device, "off")
    plain.model.load_state_dict(trainer.model.state_dict())
    x, y = images()
    computed.append(0)
    found = trainer.evaluate((x, y)), trainer.predict(x)
    assert computed[-1] < SAMPLES
    expected = plain.evaluate((x, y)), plain.predict(x)
    assert found[0]["loss"] == pytest.approx(expected[0]["loss"], rel=1e-3)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-2, atol=1e-2)


def test_another_trainer_evaluates_by_rows_on_the_disk(device, computed):
    data = flatout.data.arrays(*images()).batch(BATCH)
    fitted(device, "disk", data)
    trainer = trainer_of(network(), device, "disk")
    computed.append(0)
    trainer.evaluate(data)
    assert computed[-1] < SAMPLES


def test_rows_lie_on_the_device_until_memory_runs_out_there(device):
    freed = []

    class GiveWay(flatout.Callback):
        def on_epoch_end(self, state):
            freed.append(features_give_way())

    plain = fitted(device, "off")
    ours = fitted(device, "memory", callbacks=[GiveWay()])
    assert (sum(freed) > 0) == (device.type == "cuda")
    check_alike(ours, plain, 1e-2)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_pins_its_memory(device, computed, workers):
    def loader():
        order = torch.Generator().manual_seed(0)
        return DataLoader(
            TensorDataset(*images()),
            BATCH,
            shuffle=True,
            generator=order,
            num_workers=workers,
            pin_memory=device.type == "cuda",
        )

    plain = fitted(device, "off", loader())
    ours = fitted(device, "memory", loader(), counts=computed)
    assert computed[0] + computed[1] < 3 * SAMPLES
    assert computed[2] == 0
    check_alike(ours, plain, 1e-2)


def photographs(folder):
    from PIL import Image

    for name in "ab":
        (folder / name).mkdir(parents=True)
        for number in range(SAMPLES // 2):
            draw = np.random.default_rng([ord(name), number])
            pixels = draw.integers(0, 256, (24, 20, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return folder


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_flipped_images_of_a_folder(device, computed, tmp_path, where):
    folder = photographs(tmp_path / "photos")

    def read():
        data = flatout.data.images(folder, size=16).augment(flip="horizontal")
        return data.normalize(0.5, 0.5).shuffle(seed=1).batch(BATCH)

    plain = fitted(device, "off", read())
    ours = fitted(device, where, read(), counts=computed, epochs=3)
    assert ours[1].features["kept"]["variants"] == 2
    assert sum(computed) < 3.2 * SAMPLES
    check_alike(ours, plain, 1e-2)
    computed.append(0)
    scores = ours[0].predict(flatout.data.images(folder, size=16).normalize(0.5, 0.5))
    assert scores.shape == (SAMPLES, 3)


def test_crops_at_random_keep_no_features(device, tmp_path):
    folder = photographs(tmp_path / "photos")
    data = flatout.data.images(folder, size=20).augment(crop=16)
    _, history = fitted(device, "memory", data.normalize(0.5, 0.5).batch(BATCH))
    kept = history.features["kept"]  # at most what is decoded, before the crop
    assert kept is None or kept["name"] == "decoded pixels"
    assert np.isfinite(losses(history)).all()


def test_frozen_layers_stay_as_they_are(device):
    model = network().to(device)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.train()
    assert not model[4].training
    fitted(device, "off", model=model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) == (int(name.split(".")[0]) < 7), name


def test_layers_that_train_from_an_epoch_on(device, computed):
    def run(where, counts=None):
        thaw = flatout.Unfreeze(epoch=3, layers="3", lr=0.01)
        return fitted(device, where, epochs=4, callbacks=[thaw], counts=counts)

    plain, ours = run("off"), run("memory", computed)
    assert computed[1] == 0  # before the thaw
    assert not torch.equal(ours[0].model[3].weight.cpu(), network()[3].weight)
    check_alike(ours, plain, 1e-2)


SCRIPT = """
import json, sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device = torch.device(sys.argv[1])
torch.manual_seed(0)
body = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
)
body.requires_grad_(False).eval()
forward, computed = body[0].forward, []
body[0].forward = lambda x: (computed.append(len(x)), forward(x))[1]
model = nn.Sequential(body, nn.Linear(32, 3)).to(device)
optimizer = torch.optim.SGD(model[1].parameters(), 0.1)
data = TensorDataset(torch.randn(64, 3, 16, 16), torch.randint(0, 3, (64,)))
for epoch in range(4):
    for x, y in DataLoader(data, 8, shuffle=True, pin_memory=device.type == "cuda"):
        optimizer.zero_grad()
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
print(json.dumps([sum(computed), model[1].weight.tolist()]))
"""


def test_a_script_written_without_flatout(device, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    flatout_run = [sys.executable, "-c", "from flatout.cli.main import main; main()", "run"]

    def run(*settings):
        command = [*flatout_run, *settings, str(path), device.type]
        done = subprocess.run(command, capture_output=True, text=True, timeout=50)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    every, plain = run()
    once, ours = run("--set", "script.features=memory")
    assert every == 4 * 64
    assert once < 2.5 * 64  # each once, and the batches that are looked at or checked
    np.testing.assert_allclose(ours, plain, atol=1e-3)


def test_a_keras_application(device, computed):
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "torch":
        pytest.skip("Keras is on another backend")
    x, y = images(48)
    x = x.repeat_interleave(2, 2).repeat_interleave(2, 3).permute(0, 2, 3, 1).contiguous()

    def run(where, counts=None):
        keras.utils.set_random_seed(0)
        base = keras.applications.VGG16(weights=None, include_top=False, input_shape=(32, 32, 3))
        for layer in base.layers:
            layer.trainable = layer.name.startswith("block5")
        head = keras.layers.Dense(3)(keras.layers.Flatten()(base.output))
        model = keras.Model(base.input, head)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=keras.optimizers.SGD(1e-3), loss=loss)
        recipe = Recipe(
            input={"features": where},
            compute={"precision": "fp32"},
            world={"device": device.type},
        )
        trainer = flatout.Trainer(model, recipe=recipe, say=lambda line: None)
        callbacks = [Count(counts)] if counts else []
        return model, trainer.fit(x, y, epochs=3, batch_size=BATCH, callbacks=callbacks, verbose=0)

    (plain, expected), (ours, history) = run("off"), run("memory", computed)
    assert "block4_pool" in history.features["kept"]["name"]
    assert computed[1:3] == [0, 0]
    assert losses(history) == pytest.approx(losses(expected), rel=1e-2)
    for one, other in zip(ours.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-2)


def test_what_pays_is_measured(device, monkeypatch):
    """A frozen part of many layers before a small head, and no one says what to choose."""
    monkeypatch.setattr(features, "choose", frozen_choice.choose)
    torch.manual_seed(0)
    layers = [part for _ in range(8) for part in (nn.Conv2d(64, 64, 3, padding=1), nn.ReLU())]
    body = nn.Sequential(nn.Conv2d(3, 64, 3), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = nn.Sequential(body.requires_grad_(False), nn.Linear(64, 3))
    draw = torch.Generator().manual_seed(0)
    data = torch.randn(128, 3, 64, 64, generator=draw), torch.arange(128) % 3
    trainer = trainer_of(model, device, "memory")
    history = trainer.fit(data, epochs=6, batch_size=32, progress=False)
    assert history.features["kept"] is not None, history.features["why"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_rows_come_back_as_they_were_put(device, dtype):
    rows = torch.randint(0, 200, (12, 5, 4, 4)).to(device, dtype)
    part = RowPart((5, 4, 4), dtype, channels_last=True)
    store = NamedStore.open(f"rows of {dtype}", [part], "memory")
    given = rows.clone(memory_format=torch.channels_last)
    names = sample_names(given)
    if device.type == "cuda":
        store.lie_on(device, parts=1, expected=12)
    store.put(names, [given])
    given.zero_()  # as an operator in place does
    places = store.places(names[::-1])
    assert (places >= 0).all()
    (found,) = store.get(places)
    assert found.device.type == device.type
    assert torch.equal(found, rows.flip(0))


def test_samples_have_the_same_names_on_each_device(device):
    rows = torch.randint(0, 256, (32, 1001), dtype=torch.uint8)
    assert torch.equal(hashed(rows.to(device)).cpu(), hashed(rows))
    batch = torch.randn(32, 3, 7, 5)
    assert len(set(sample_names(batch.to(device)))) == 32
    assert sample_names(batch.to(device)[3:5]) == sample_names(batch.to(device))[3:5]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.bool]
)
def test_a_change_that_torch_does_not_count_is_noticed(dtype, device):
    tensor = torch.zeros(3, 5, device=device).to(dtype)
    contents = Contents([torch.ones(2), tensor, tensor.t()[1:]])
    assert contents.are_same()
    tensor.data[2, 4] = 1
    assert not contents.are_same()
    tensor.data[2, 4] = 0
    assert contents.are_same()
