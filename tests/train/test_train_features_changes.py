"""A fit that finds rows of another computes again what differs, and learns what it learns without.

Whatever has changed since, and whatever goes wrong meanwhile.
"""

import os
import re
import subprocess
from importlib import metadata
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from train_jobs import figures, quiet

import flatout
from flatout.data.features import key
from flatout.data.features.row_log import RECORD
from flatout.recipe import Recipe
from flatout.train.parts.features import features
from flatout.train.parts.features.choice import Choice

IMAGES, SIZE = 12, 32


class Net(nn.Module):
    """Frozen up to its head."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.norm = nn.BatchNorm2d(8)
        self.pool = nn.MaxPool2d(4)
        self.head = nn.LazyLinear(2)
        self.gain = 1.0

    def forward(self, x):
        return self.head(self.pool(self.norm(self.first(x)) * self.gain).flatten(1))


class Job:
    """What a fit is made of.

    Attributes:
        folder: has the images.
        size: that they are brought to.
        brightness: by which they are changed, once for all epochs; None leaves them alone.
        precision: of the arithmetic.
        change: is called with the model.
        first: the model of the first fit.
    """

    def __init__(self, folder):
        self.folder, self.size, self.brightness, self.precision = folder, SIZE, 0.2, "fp32"
        self.change, self.first = quiet, None

    def fitted(self, where, callbacks=(), say=quiet):
        """The trained model, its history, and how many rows it has kept that were not there."""
        torch.manual_seed(0)
        model = Net()
        model(torch.zeros(1, 3, self.size, self.size))
        flatout.freeze(model, until="pool")
        self.change(model)
        data = flatout.data.images(self.folder / "images", size=self.size, on_error="skip")
        if self.brightness is not None:
            data = data.augment(brightness=self.brightness, views=1)
        data = data.shuffle(seed=1).batch(4)
        recipe = Recipe(input={"features": where}, compute={"precision": self.precision})
        trainer = flatout.Trainer(
            model, optimizer="sgd", lr=0.1, metrics=["accuracy"], recipe=recipe, say=say
        )
        before = rows_kept()
        history = trainer.fit(data, epochs=4, progress=False, callbacks=list(callbacks))
        return trainer.model, history, rows_kept() - before


def rows_kept():
    """On the disk, of all stores."""
    logs = flatout.cache_folder.cache_folder().glob("features/*/filled.log")
    return sum(log.stat().st_size for log in logs) // RECORD.itemsize


def path_of(folder, number):
    return folder / "images" / "ab"[number % 2] / f"{number}.jpg"


def draw(path, seed):
    pixels = np.random.default_rng(seed).integers(0, 256, (SIZE, SIZE, 3), np.uint8)
    Image.fromarray(pixels).save(path, quality=95)


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A job that was fitted once, with what it has kept: of the cuts the smallest, though short."""

    def choose(options, samples, epochs, plain_s):
        best = min(options, key=lambda one: one.bytes)
        return Choice(best, "", plain_s, plain_s / 10, 2, best.bytes * samples * best.variants)

    monkeypatch.setattr(features, "choose", choose)
    monkeypatch.setenv("FLATOUT_CACHE", str(tmp_path / "cache"))
    for number in range(IMAGES):
        path = path_of(tmp_path, number)
        path.parent.mkdir(parents=True, exist_ok=True)
        draw(path, number)
    job = Job(tmp_path)
    job.first, history, rows = job.fitted("disk")
    assert history.features["kept"] is not None
    assert rows == IMAGES
    return job


def check(job, rows):
    """That a fit finds what the change has left, and learns what it learns without a store."""
    plain, expected, _ = job.fitted("off")
    model, history, computed = job.fitted("disk")
    assert computed in rows
    assert history.features["kept"] is not None
    apart = 1e-5
    ours, theirs, others = (dict(one.named_parameters()) for one in (model, plain, job.first))
    for name, weight in theirs.items():
        assert torch.allclose(ours[name], weight, atol=apart)
    losses = [[epoch["loss"] for epoch in one.epochs] for one in (history, expected)]
    assert np.allclose(*losses, atol=apart)
    head, was = theirs["head.weight"], others["head.weight"]
    # Or rows of the first fit would do as well.
    assert head.shape != was.shape or not torch.allclose(head, was, atol=2 * apart)


@pytest.mark.slow
def test_what_is_the_same_is_computed_no_more(job):
    plain, expected, _ = job.fitted("off")
    model, history, computed = job.fitted("disk")
    assert computed == 0
    assert figures(history) == figures(expected)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def change_weight(model):
    with torch.no_grad():
        model.first[0].weight[0, 0, 0, 0] += 0.5


def change_buffer(model):
    model.norm.running_var[3] += 1


def change_mode(model):
    model.norm = nn.BatchNorm2d(8).requires_grad_(False)


def change_call(model):
    model.gain = 1.5


@pytest.mark.parametrize(
    "change",
    [
        change_weight,
        pytest.param(change_buffer, marks=pytest.mark.slow),
        pytest.param(change_mode, marks=pytest.mark.slow),
        pytest.param(change_call, marks=pytest.mark.slow),
    ],
)
def test_another_model_finds_nothing(job, change):
    job.change = change
    check(job, {IMAGES})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value"), [("size", 24), ("brightness", 0.6), ("precision", "bf16")]
)
def test_other_settings_find_nothing(job, name, value):
    setattr(job, name, value)
    check(job, {IMAGES})


@pytest.mark.slow
def test_other_versions_of_libraries_find_nothing(job, monkeypatch):
    changed = {}

    def version(name):
        return changed.get(name) or metadata.version(name)

    other = SimpleNamespace(version=version, PackageNotFoundError=metadata.PackageNotFoundError)
    monkeypatch.setattr(key, "metadata", other)
    for name in ("torch", "simplejpeg"):
        changed[name] = "0"
        assert job.fitted("disk")[2] == IMAGES


def change_pixel(path):
    pixels = np.asarray(Image.open(path)).copy()
    pixels[5, 7] ^= 255
    Image.fromarray(pixels).save(path, quality=95)


def replace(path):
    """Another picture with the size and the time of the file."""
    was = path.stat()
    draw(path, 99)
    content = path.read_bytes()
    if len(content) > was.st_size:
        path.unlink()
        Image.fromarray(np.full((SIZE, SIZE, 3), 90, np.uint8)).save(path, quality=95)
        content = path.read_bytes()
    # Behind the end of a JPEG a decoder reads nothing.
    path.write_bytes(content.ljust(was.st_size, b"\0"))
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (was.st_size, was.st_mtime_ns)


@pytest.mark.slow
@pytest.mark.parametrize("change", [change_pixel, replace])
def test_another_file_is_computed_again(job, change):
    change(path_of(job.folder, 5))
    # Its row alone, or all where rows are not known by the bytes of their files.
    check(job, {1, IMAGES})


@pytest.mark.slow
@pytest.mark.parametrize("brightness", [None, 0.6])
def test_of_a_folder_whose_files_come_and_go_only_new_images_are_computed(job, brightness):
    job.brightness = brightness  # of a view that is drawn for each
    assert job.fitted("disk")[2] == IMAGES
    for number in range(IMAGES, IMAGES + 3):
        draw(path_of(job.folder, number), number)
    draw(job.folder / "images" / "a" / "00.jpg", 500)  # the others get other numbers
    grown = job.fitted("disk")
    assert grown[2] == 4
    same(grown, job.fitted("off"))
    path_of(job.folder, 3).unlink()
    replace(path_of(job.folder, 5))
    found = job.fitted("disk")
    assert found[2] == 1
    same(found, job.fitted("off"))


@pytest.mark.slow
def test_a_file_that_is_replaced_while_training_counts_as_damaged(job):
    job.brightness = None
    job.fitted("disk")
    backup = {number: path_of(job.folder, number).read_bytes() for number in (3, 5, 8)}

    class Replace(flatout.Callback):
        """Between two epochs."""

        def on_epoch_end(self, state):
            if state.epoch == 0:
                replace(path_of(job.folder, 8))
                larger = path_of(job.folder, 5)
                Image.open(larger).rotate(90).resize((3 * SIZE, 2 * SIZE)).save(larger, quality=95)
                broken = path_of(job.folder, 3)
                broken.write_bytes(broken.read_bytes()[:-400])

    found = job.fitted("disk", [Replace()])
    for number, content in backup.items():
        path_of(job.folder, number).write_bytes(content)
    same(found, job.fitted("off", [Replace()]))
    assert found[2] == 0
    told = [line for line in found[1].notes if "replaced" in line]
    numbers = re.findall(r"(\d+)\.jpg", " ".join(told))
    more = sum(int(count) for count in re.findall(r"and (\d+) more", " ".join(told)))
    assert len(set(numbers)) == len(numbers) == len(backup) - more  # each once
    (line,) = (line for line in found[1].notes if "skipped" in line)
    assert "3 bad rows skipped: " in line
    assert "has changed since it was opened" in line
    # What has taken their place is another sample for the next run, which keeps it.
    again = job.fitted("disk")
    assert again[2] == 2
    same(again, job.fitted("off"))


# ---- what goes wrong ----


def same(one, other):
    """That two fits have learned the same."""
    (model, history, _), (plain, expected, _) = one, other
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    assert figures(history) == figures(expected)


@pytest.mark.slow
def test_an_image_that_cannot_be_read_is_left_out(job):
    path = path_of(job.folder, 5)
    path.write_bytes(path.read_bytes()[:-400])
    found = job.fitted("disk")
    same(found, job.fitted("off"))
    assert found[2] in (0, IMAGES - 1)


@pytest.mark.slow
def test_flipped_bytes_are_named_and_computed_again(job):
    (rows,) = (job.folder / "cache" / "features").glob("*/rows")
    content = bytearray(rows.read_bytes())
    content[len(content) // (2 * IMAGES)] ^= 1  # there may be room for more behind the rows
    rows.write_bytes(bytes(content))
    told = []
    found = job.fitted("disk", say=told.append)
    assert found[2] == 1
    assert sum("differs from its checksum and is computed again" in line for line in told) == 1
    same(found, job.fitted("off"))


class At(flatout.Callback):
    """Calls once, after a step."""

    every = 1

    def __init__(self, step, call):
        self.step, self.call = step, call

    def on_step(self, state):
        if state.step == self.step:
            self.call()


@pytest.mark.slow
def test_two_runs_fill_one_store_at_once(job):
    job.change = change_call  # nothing of it is kept
    within = []
    found = job.fitted("disk", [At(2, lambda: within.append(job.fitted("disk")))])
    plain = job.fitted("off")
    same(found, plain)
    same(within[0], plain)
    # Of the inner fit, those that the outer one had not kept yet; of both together, each once.
    assert 0 < within[0][2] < IMAGES
    assert found[2] == IMAGES


@pytest.mark.slow
def test_a_file_that_is_replaced_while_it_is_trained_on_is_another_in_the_next_run(job):
    job.brightness = 0.4
    job.fitted("disk", [At(2, lambda: replace(path_of(job.folder, 5)))])
    found = job.fitted("disk")
    assert found[2] in (1, IMAGES)
    same(found, job.fitted("off"))


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk")
def test_on_a_full_disk_training_goes_on_and_that_is_told_once(job, monkeypatch):
    disk = job.folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=80k", "tmpfs", disk], check=True)
    try:
        monkeypatch.setenv("FLATOUT_CACHE", str(disk / "cache"))
        # As if another process had taken it since there was room.
        monkeypatch.setattr("flatout.data.features.kept_rows.disk_room", lambda: 1 << 30)
        told = []
        job.change = widen
        found = job.fitted("disk", say=told.append)
        assert 0 < found[2] < IMAGES
        assert sum("nothing more can be kept" in line for line in told) == 1
        same(found, job.fitted("off"))
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def widen(model):
    """Rows of 8 KB."""
    model.pool = nn.MaxPool2d(1)
    torch.manual_seed(0)
    model.head = nn.LazyLinear(2)
    model(torch.zeros(1, 3, SIZE, SIZE))
