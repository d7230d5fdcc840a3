"""What pipelines give, byte for byte, and say of themselves, as digests that must not change."""

import hashlib

import numpy as np
import pytest
import torch
from data_made_up import MadeUp

import flatout.data as data
from flatout.data.batches.batch import named_tensors
from flatout.data.pipeline import Pipeline
from flatout.data.reading.block import join

ROWS = 46


class Chunked:
    """MadeUp rows in chunks of seven."""

    def __init__(self):
        self._made = MadeUp(ROWS)
        self.schema = self._made.schema
        self.sizes = np.diff(np.append(np.arange(0, ROWS, 7), ROWS)).astype(np.int64)
        self.digest = "chunked"

    def read(self, chunk, buffers):
        start = 7 * chunk
        return self._made.take(np.arange(start, start + self.sizes[chunk]), buffers)

    def where(self, number):
        return f"chunked:{number}"

    def describe(self):
        return "chunked rows"

    def notes(self):
        return ["a note of the source"]


class Flow:
    """MadeUp rows one after the other, in pieces of five."""

    def __init__(self, known=True):
        self._made = MadeUp(ROWS)
        self.schema = self._made.schema
        self.rows = ROWS if known else None
        self.digest = "flow"

    def blocks(self, epoch, buffers):
        for start in range(0, ROWS, 5):
            pieces = np.array_split(np.arange(start, min(ROWS, start + 5)), 2)
            yield join([self._made.take(piece, buffers) for piece in pieces])

    def describe(self):
        return "a flow of rows"

    def notes(self):
        return []


class Listed(torch.utils.data.Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, number):
        return torch.arange(3) + number, number % 4


def rows(**given):
    return Pipeline(MadeUp(ROWS, **given))


def in_memory(**given):
    x = torch.arange(ROWS * 4, dtype=torch.uint8).reshape(ROWS, 2, 2)
    return data.arrays(x, torch.arange(ROWS) % 4, torch.arange(ROWS) / ROWS, **given)


def table():
    x = [n / 4 for n in range(ROWS)]
    y = [n % 3 for n in range(ROWS)]
    return data.table(
        {"x": x, "word": [str("abc"[n % 3]) for n in range(ROWS)], "y": y}, target="y"
    )


def files(name):
    """A source of files that are written where the test runs."""
    if name == "npy":
        np.save("x.npy", np.arange(ROWS * 6, dtype=np.float32).reshape(ROWS, 2, 3))
        np.save("y.npy", np.arange(ROWS) % 5)
        return data.npy("x.npy", "y.npy")
    if name == "npz":
        np.savez("xy.npz", x=np.arange(ROWS * 2.0).reshape(ROWS, 2), y=np.arange(ROWS) % 5)
        return data.npz("xy.npz")
    for part in range(3):
        with open(f"part-{part}.{name}", "w", encoding="utf-8") as file:
            if name == "csv":
                file.write("a,b,label\n")
            for n in range(part, ROWS, 3):
                csv = f"{n},{n / 8},{n % 3}\n"
                file.write(csv if name == "csv" else f"{n % 2} 1:{n} {2 + n % 5}:{n / 4}\n")
    if name == "csv":
        return data.csv("part-*.csv", target="label")
    return data.libsvm("part-*.libsvm")


def double(inputs, target):
    return inputs["x"] * 2, target


def noisy(inputs, target, rng):
    return inputs["x"] + torch.from_numpy(rng.random(3)), target


def drawn(inputs, target):
    return inputs["x"] + torch.rand(3), target


def add_one(x, y):
    return x + 1, y


def jitter(x, y, rng):
    return x + rng.random(), y


def weighted(x, y):
    return x, y, y / 5


def odd(inputs, target):
    return target % 2 == 1


def add_one_of_sample(x, y):
    return x + 1, y


def first_input(x, y):
    return x["x"], y


def image(inputs, target):
    return torch.full((1, 2, 2), int(target), dtype=torch.uint8), target


def turned(x, y, weight):
    return x.flip(-1), y, weight


def mixed(**given):
    return data.mix(rows().shuffle(2), rows(name="other").filter(odd), **given)


# What makes the pipeline, the digest of its batches, and that of what it says of itself.
PINNED = [
    ("rows().batch(8)", "5a21a3dd", "e54f1e08"),
    ('rows().batch(8, last="drop")', "97ee5814", "24d4a4df"),
    ('rows().batch(8, last="pad")', "ec6f00ed", "0f4d6f8a"),
    ("rows().shuffle(3).batch(8)", "e37480b6", "98ff4437"),
    ("rows().shuffle(3, window=10).batch(8)", "909ff2c8", "f8518269"),
    ("rows().batch(8).shuffle(3)", "e37480b6", "c2fa4676"),
    ("rows().batch(8, by_length=True)", "266197f7", "2ac7e23c"),
    ("rows().shuffle(1).batch(4, by_length=3)", "b952190c", "61bdda4f"),
    ("rows().repeat(2).batch(8)", "5f00ec8e", "73141961"),
    ("rows().batch(8).repeat(2)", "3bdddc79", "09b3deea"),
    ('rows().shuffle(4).batch(8, last="drop").repeat(3)', "3ce8d660", "1494c770"),
    ('rows().shuffle(4).repeat(3).batch(8, last="pad")', "01d5a10a", "ac0232d8"),
    ("rows().shuffle(1).batch(4, by_length=3).repeat(2)", "45c1f17d", "91364306"),
    ("rows().repeat(2).shuffle(1).batch(4, by_length=3)", "e2a43aa2", "2623b89b"),
    ("rows().map(double).batch(8)", "37a84194", "03844558"),
    ("rows().map(double).batch(8).map(add_one)", "31ce30ca", "c91eba18"),
    ('rows().map(double).batch(8, last="pad").map(add_one).map(weighted)', "76f20aef", "64e38d05"),
    ("rows().shuffle(2).map(noisy).batch(8).map(jitter)", "4512276d", "068ed040"),
    ("rows().map(drawn).shuffle(2).batch(8)", "09811c52", "21a54a1c"),
    ("rows().map(noisy).batch(8)", "f7e7d8d4", "49bc8a91"),
    ("rows().map(noisy).options(depth=2, threads=2).batch(8)", "f7e7d8d4", "49bc8a91"),
    ("rows().filter(odd).shuffle(2).batch(8)", "a12bc67c", "ef15a26f"),
    ("rows().shuffle(2).filter(odd).map(double).batch(8)", "e66e8286", "5448085c"),
    ("rows().map(image).normalize(0.5, 0.25).batch(8)", "6a912898", "530406fd"),
    (
        'rows().map(image).normalize(0.5, 0.25).shuffle(5).batch(8, last="pad")',
        "99771676",
        "940a4dfc",
    ),
    ("rows().split(0.7)[0].batch(8)", "9776dc61", "e3299326"),
    ("rows().split(0.7, seed=3)[1].shuffle(1).batch(8)", "044c416d", "f58fe8d6"),
    ('rows().split(0.7, by="order")[1].batch(8)', "5d022e17", "b9d17385"),
    ("rows().split(0.7, stratify=True)[0].shuffle(1).batch(8)", "aceb6e0c", "d5df1d57"),
    ("rows().filter(odd).split(0.5)[0].map(double).batch(4)", "65822c5b", "a20ebeab"),
    ("rows().shard(1, 3).batch(8)", "47171e4e", "99ee315f"),
    ("rows().shuffle(1).batch(8).shard(2, 3)", "66f84c9f", "00f967fe"),
    ('rows().shuffle(1).batch(8, last="pad").shard(2, 3)', "efdc6e4e", "911d96d6"),
    ('rows().shuffle(1).shard(1, 3, by="rows").batch(8)', "fb57e7f0", "f88aa695"),
    ('rows().shard(1, 3, by="rows").batch(8).repeat(2)', "f5cb5bc9", "0431715d"),
    ("rows().shard(0, 1, presharded=True, steps=4).shuffle(1).batch(8)", "61d07647", "81e22cc7"),
    ('rows().cache("memory").shuffle(1).batch(8)', "4b53876a", "6df3720f"),
    ('rows().shuffle(1).batch(8).cache("memory")', "4b53876a", "fda4888c"),
    ('rows().map(double).cache("memory").map(add_one_of_sample).batch(8)', "31ce30ca", "10bd7575"),
    ('rows().map(noisy).cache("memory").batch(8)', "f7e7d8d4", "7edeab69"),
    ('rows().map(drawn).cache("memory").shuffle(2).batch(8)', "09811c52", "87232260"),
    (
        'rows().shuffle(1).batch(8).map(first_input).repeat(2).cache("memory")',
        "de65c347",
        "28d53453",
    ),
    ('rows().map(double).cache("disk", folder="kept").shuffle(1).batch(8)', "ae0b9c30", "96fe9c6e"),
    ('rows().shuffle(1).batch(8).prefetch("cpu")', "4b53876a", "93624e37"),
    ("in_memory().batch(8)", "d2da3bd1", "88dd5363"),
    ("in_memory().shuffle(7).batch(8)", "c3758d3c", "68ae1c0e"),
    (
        'in_memory(scale=1 / 255, shift=-0.5).shuffle(7).batch(8, last="drop")',
        "3c26ad12",
        "ded994cd",
    ),
    ('in_memory().shuffle(7).batch(8, last="pad")', "9d285947", "278ad5a5"),
    ("in_memory().shuffle(7).batch(8).repeat(2)", "42539cb8", "418ada85"),
    ("in_memory().map(turned).shuffle(7).batch(8).map(turned)", "c3758d3c", "810ce231"),
    ('in_memory().cache("memory").split(0.5, stratify=True)[1].batch(8)', "9ccea78b", "fb74e777"),
    ("in_memory().shard(1, 2).shuffle(1).batch(8)", "6e3e1dd6", "c77fea6e"),
    ("table().shuffle(1).batch(8)", "9eafddc1", "3b2bba16"),
    ('table().split(0.5, stratify=True)[0].cache("memory").batch(8)', "307cde1b", "d5ece30a"),
    ('files("csv").shuffle(1).batch(8)', "59a51c35", "c645fa25"),
    ('files("csv").shard(1, 2, by="files").batch(8)', "e0d80d23", "a2f99190"),
    ('files("libsvm").shuffle(1).batch(8).map(add_one)', "58a5fa3d", "8606b769"),
    (
        'files("libsvm").shard(1, 2, by="files").shuffle(1).batch(8).repeat(2)',
        "9f6fb0b4",
        "f104ba5c",
    ),
    ('files("npy").shuffle(1).split(0.6)[1].batch(8)', "20b21ee5", "c2de1ebf"),
    ('files("npz").repeat(2).batch(8)', "17222e21", "a62d100b"),
    ("Pipeline(Chunked()).batch(8)", "5a21a3dd", "acf1325e"),
    ("Pipeline(Chunked()).shuffle(1).batch(8)", "4b53876a", "272ccecb"),
    ("Pipeline(Chunked()).shuffle(1, window=7).map(double).batch(8)", "0ac4cd95", "13e767eb"),
    ('Pipeline(Chunked()).map(double).cache("memory").batch(8)', "37a84194", "ae19fc3a"),
    ("data.torch_dataset(Listed()).shuffle(1).batch(8)", "05a76818", "01114324"),
    (
        'data.torch_dataset(Listed()).map(add_one).cache("memory").batch(8).repeat(2)',
        "1fda8742",
        "6a789388",
    ),
    ("mixed().batch(8)", "78f389be", "c3e749ae"),
    ('mixed().shuffle(9).map(double).cache("memory").batch(8)', "fcb1cd2b", "bceb1037"),
    ("mixed(weights=[3, 1], seed=4).shuffle(5).batch(8).repeat(2)", "79735753", "347e04d9"),
    ('mixed(weights=[1, 1]).repeat(2).batch(8, last="pad").shard(1, 2)', "93fe6d2b", "1e5a8efb"),
    ("Pipeline(Flow()).batch(8)", "5a21a3dd", "195d3a74"),
    ('Pipeline(Flow()).batch(8, last="drop")', "97ee5814", "7ec94e08"),
    (
        "Pipeline(Flow(known=False)).filter(odd).map(double).batch(8).map(add_one)",
        "1e591503",
        "f8e9a032",
    ),
    (
        "Pipeline(Flow()).shuffle(1, window=9).map(noisy).batch(8).map(jitter)",
        "fe13439b",
        "98bd5802",
    ),
    ("Pipeline(Flow()).map(double).shuffle(1, window=9).batch(8)", "b99e5079", "22d29bfa"),
    ("Pipeline(Flow()).batch(8).repeat(2)", "3bdddc79", "756e072e"),
    ("Pipeline(Flow()).shuffle(2, window=9).repeat(2).batch(8)", "9ba8c020", "d9083e9d"),
    ("Pipeline(Flow()).map(image).normalize(0.5, 0.25).batch(8)", "6a912898", "1b5512c3"),
    ("Pipeline(Flow()).batch(9).shard(1, 2)", "9eaf71df", "0cbc2278"),
    (
        "Pipeline(Flow()).batch(8).repeat(2).shard(0, 2, presharded=True, steps=6)",
        "f49a7cd0",
        "b6e56a79",
    ),
    ('Pipeline(Flow()).batch(8).prefetch("cpu", depth=3)', "5a21a3dd", "dd7c2e49"),
]


def bytes_of(batch):
    yield repr((batch.size, batch.padding, batch.start, batch.whole, batch.copies)).encode()
    for name, tensor in named_tensors("", tuple(batch[:4])):
        yield f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode()
        yield tensor.contiguous().numpy().tobytes()


def digest(parts):
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:8]


def digest_of_batches(pipeline):
    found = []
    for epoch, start in ((0, 0), (1, 0), (1, 1)):
        for batch in pipeline.batches(epoch, start):
            found += bytes_of(batch)
    return digest(found)


def said(pipeline):
    """All that it says of itself, but what depends on the machine or the bytecode of functions."""
    explanation = pipeline.explanation()
    notes = [note for note in explanation.notes if not note.startswith("cache in ")]
    words = [line.partition(" (code ")[0] for line in pipeline.stage_words]
    counts = (pipeline.samples, pipeline.rows_to_cut, pipeline.steps, pipeline.batch_size)
    last = (pipeline.last_batch, pipeline.labels_range(), explanation.padding)
    wrote = (explanation.written, explanation.runs, notes, words)
    return repr((repr(pipeline), pipeline.describe(), wrote, counts, last))


@pytest.mark.parametrize(("written", "batches", "words"), PINNED)
def test_a_pipeline_gives_the_same_bytes_and_words(written, batches, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(1)
    pipeline = eval(written)
    assert digest_of_batches(pipeline) == batches
    assert digest([said(pipeline).encode()]) == words, said(pipeline)
