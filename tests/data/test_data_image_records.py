from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from data_photographs import encoded, exif, photo, write

from flatout.data.conversion.convert import convert
from flatout.data.reading.block import Block, is_channels_last, join, offsets_of, take_values
from flatout.data.reading.buffers import Buffers
from flatout.data.reading.error_policy import ErrorPolicy
from flatout.data.reading.indexed import IndexedRows
from flatout.data.sources.images import image_header, image_records
from flatout.data.sources.images.images import images
from flatout.errors import DataError
from flatout.kernels import example

pytest.importorskip("PIL.Image")
pytest.importorskip("simplejpeg")

CLASSES = ["cat", "dog"]


@pytest.fixture
def pets(tmp_path):
    """Three cats, two dogs; JPEG and PNG, one of them on its side."""
    for number in range(5):
        array = photo(120, 160, number)
        content = encoded(array, "PNG") if number == 1 else encoded(array)
        if number == 3:
            content = encoded(photo(160, 120, number), exif=exif(6))
        write(tmp_path / "pets" / f"{'cat' if number < 3 else 'dog'}/{number}.jpg", content)
    return tmp_path / "pets"


@pytest.fixture
def shards(pets, tmp_path):
    convert(pets, tmp_path / "out/pets.tfrecord", shards=2, progress=False)
    return str(tmp_path / "out/*.tfrecord")


def rows(*args, **options):
    return images(*args, **options).origin


def take(source, numbers=None):
    wanted = range(source.rows) if numbers is None else numbers
    return source.take(np.array(wanted, np.int64), Buffers())


def ragged(parts):
    return np.frombuffer(b"".join(parts), np.uint8), offsets_of([len(part) for part in parts])


def shard(path, contents, labels=None, paths=None, **others):
    """A shard of these images; returns its path."""
    columns = {"image": ragged(contents), **others}
    if labels is not None:
        columns["label"] = np.array(labels, np.int64)
    if paths is not None:
        columns["path"] = ragged([one.encode() for one in paths])
    write(path, bytes(example.encode(columns)[0]))
    return path


def spoil(path, record, place):
    """Turn over a bit of a record, counted from its end."""
    content = bytearray(path.read_bytes())
    end = 0
    for _ in range(record + 1):
        end += 16 + struct.unpack_from("<Q", content, end)[0]
    content[end - 4 - place] ^= 1
    path.write_bytes(bytes(content))


def in_channels_last(image):
    return torch.as_tensor(image).is_contiguous(memory_format=torch.channels_last)


# -- the same as the folder ------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"channels": 1},
        {"size": 70},
        {"size": (40, 90), "resize": "crop"},
        {"size": 50, "resize": "fit", "reduced": True},
    ],
    ids=["as stored", "gray", "resized", "cropped", "reduced"],
)
def test_shards_hold_what_the_folder_holds(pets, shards, options):
    folder, packed = rows(pets, **options), rows(shards, classes=CLASSES, **options)
    assert packed.schema == folder.schema
    assert packed.describe() == folder.describe()
    assert packed.notes() == folder.notes()
    assert packed.targets().tolist() == [0, 0, 0, 1, 1]
    ours, theirs = take(packed, [4, 0, 3, 3]), take(folder, [4, 0, 3, 3])
    assert ours.numbers.tolist() == [4, 0, 3, 3]
    for name in ("image", "label"):
        np.testing.assert_array_equal(ours.columns[name], theirs.columns[name])
    assert in_channels_last(ours.columns["image"])
    assert packed.random
    assert packed.lengths() is None


def read_as_wanted(source):
    """The same images, whose files' bytes are not held in memory."""
    held = source._images._records
    source._images._records = IndexedRows(
        held.files, held.decoder, ErrorPolicy(), "TFRecord", budget=0
    )
    return source


def test_files_on_the_disk_give_the_same(shards):
    held = take(rows(shards))
    source = read_as_wanted(rows(shards))
    np.testing.assert_array_equal(take(source).columns["image"], held.columns["image"])
    assert "stay on the disk" in source._images.notes()[0]


def test_a_row_is_named_by_shard_byte_and_path(shards, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = rows("out/*.tfrecord")
    assert source.where(0) == "out/pets-00000-of-00002.tfrecord: byte 12 (cat/0.jpg)"
    assert source.where(4).startswith("out/pets-00001-of-00002.tfrecord: byte ")
    assert source.where(4).endswith(" (dog/4.jpg)")
    shard(tmp_path / "plain.tfrecord", [encoded(photo(20, 30))], [0])
    assert rows("plain.tfrecord").where(0) == "plain.tfrecord: byte 12"


def test_classes_without_names_are_called_by_number(shards, tmp_path):
    (tmp_path / "out" / "_pets.tfrecord.toml").unlink()
    source = rows(shards)
    assert source.classes == ("0", "1")
    assert source.describe() == "5 images of 3x120x160, 2 classes (0 3, 1 2)"
    path = shard(tmp_path / "a.tfrecord", [encoded(photo(20, 30))], [2])
    assert rows(path).classes == ("0", "1", "2")
    assert rows(path, classes=["a", "b", "c", "d"]).notes() == ["classes without an image: a, b, d"]


def test_names_of_classes_are_read_beside_the_shards(shards, pets, tmp_path):
    assert rows(shards).classes == ("cat", "dog")
    assert rows(shards).targets().tolist() == [0, 0, 0, 1, 1]
    # By name, also where other data number them otherwise.
    more = rows(shards, classes=["dog", "bird", "cat"])
    assert more.targets().tolist() == [2, 2, 2, 0, 0]
    assert take(more, [0, 4]).columns["label"].tolist() == [2, 0]
    assert images(shards).with_classes(("dog", "cat")).labels_range() == (0, 1)
    # Names of one's own for the numbers.
    assert rows(shards, classes=["Katze", "Hund"]).targets().tolist() == [0, 0, 0, 1, 1]
    write(tmp_path / "others" / "dog" / "1.jpg", encoded(photo(120, 160, 9)))
    convert(str(tmp_path / "others"), tmp_path / "out" / "val.tfrecord")
    both = [shards, str(tmp_path / "out" / "val-*.tfrecord")]
    with pytest.raises(DataError, match=r"(?s)cat, dog in .*pets.*dog in .*val.*mix"):
        rows(both)
    assert rows(tmp_path / "out" / "val-00000-of-00001.tfrecord").classes == ("dog",)
    (tmp_path / "out" / "_pets.tfrecord.toml").write_text("classes = [")
    with pytest.raises(DataError, match=r"(?s)no TOML.*_pets\.tfrecord\.toml"):
        rows(shards)


def test_without_labels(shards, tmp_path):
    source = rows(shards, labels=False)
    assert source.targets() is None
    assert set(take(source).columns) == {"image"}
    path = shard(tmp_path / "a.tfrecord", [encoded(photo(20, 30))])
    assert rows(path, labels=False).rows == 1


def test_other_names_are_said_to_be_records(shards, tmp_path):
    (tmp_path / "out/pets-00000-of-00002.tfrecord").rename(tmp_path / "part-0")
    assert rows(tmp_path / "part-0", records=True).rows == 2
    with pytest.raises(DataError, match=r"no image(.|\n)*part-0"):
        rows(tmp_path / "part-0", labels=False)
    with pytest.raises(DataError, match="expected TFRecord files or image files, found both"):
        rows([tmp_path / "part-0", shards])


def test_the_digest_follows_content_and_what_is_wanted(shards, tmp_path):
    first = rows(shards).digest
    assert rows(shards).digest == first
    assert rows(shards, size=30).digest != first
    assert rows(shards, classes=["x", "y"]).digest != first
    shard(tmp_path / "out/pets-00002.tfrecord", [encoded(photo(120, 160, 7))], [0])
    assert rows(shards).digest != first


def test_headers_are_read_once(shards, monkeypatch):
    first = rows(shards)
    monkeypatch.setattr(image_records, "header_of", None)
    again = rows(shards)
    np.testing.assert_array_equal(take(again).columns["image"], take(first).columns["image"])


def test_many_records_are_looked_at_in_pieces(tmp_path):
    contents = [encoded(photo(400 + n % 3, 620, n), "BMP") for n in range(26)]
    path = shard(tmp_path / "a.tfrecord", contents, np.arange(26) % 7)
    assert path.stat().st_size > 1.1 * (16 << 20)  # more than a piece
    spoil(path, 24, 100)
    source = rows(path, size=20, on_error="skip")
    assert source.rows == 25
    assert source.targets().tolist() == [n % 7 for n in range(26) if n != 24]
    heights = [400 + n % 3 for n in range(26) if n != 24]
    assert source._images.headers["height"].tolist() == heights


@pytest.mark.parametrize("form", ["JPEG", "PNG", "TIFF", "WEBP", "BMP", "PPM", "GIF"])
def test_a_header_in_memory_is_that_of_the_file(tmp_path, form):
    options = {} if form in ("BMP", "PPM", "GIF") else {"exif": exif(6)}
    content = encoded(photo(40, 50), form, **options)
    in_file = image_header.read_header(str(write(tmp_path / "a", content)))
    assert image_header.header_of(content) == in_file
    assert image_header.header_of(memoryview(bytearray(content))) == in_file


# -- bad input -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes"),
        (b"<!DOCTYPE html><html>Not found</html>", "no image, or damaged in its header"),
        (b"\xff\xd8", "expected a segment at byte 2"),
        (b"\xff\xd8\xff\xc0\0\x11\x08\xff\xff\xff\xff\x03", "found 65,535 x 65,535"),
    ],
    ids=["empty", "html", "no more than a start", "too many pixels"],
)
def test_what_is_no_image_is_known_when_opened(tmp_path, content, message):
    good = encoded(photo(20, 30))
    paths = ["a/0.jpg", "a/1.jpg", "b/2.jpg"]
    path = shard(tmp_path / "a.tfrecord", [good, content, good], [0, 0, 1], paths)
    with pytest.raises(DataError, match=rf"{message}(.|\n)*a.tfrecord: byte [\d,]+ \(a/1.jpg\)"):
        rows(path)
    for _ in range(2):  # built, and from the cache
        source = rows(path, on_error="skip")
        assert source.rows == 2
        assert source.targets().tolist() == [0, 1]
        assert source.notes()[0].startswith("1 bad row skipped: ")
        assert "(a/1.jpg)" in source.notes()[0]
    with pytest.raises(DataError, match="max_errors is 0"):
        rows(path, on_error="skip", max_errors=0)


def test_nothing_but_bad_images(tmp_path):
    path = shard(tmp_path / "a.tfrecord", [b"no", b"none"], [0, 0])
    with pytest.raises(DataError, match="hold no rows"):
        rows(path, on_error="skip")
    write(tmp_path / "b.tfrecord", b"")
    with pytest.raises(DataError, match=r"hold no rows(.|\n)*b.tfrecord"):
        rows(tmp_path / "b.tfrecord")


def test_a_damaged_record(tmp_path):
    contents = [encoded(photo(20, 30, n)) for n in range(3)]
    path = shard(tmp_path / "a.tfrecord", contents, [0, 1, 0])
    spoil(path, 1, 200)
    with pytest.raises(DataError, match=r"expected the checksum(.|\n)*a.tfrecord: byte"):
        rows(path)
    source = rows(path, on_error="skip")
    assert source.targets().tolist() == [0, 0]
    assert "checksum" in source.notes()[0]


def test_a_shard_that_changes(tmp_path):
    path = shard(tmp_path / "a.tfrecord", [encoded(photo(20, 30))] * 2, [0, 1])
    source = read_as_wanted(rows(path))
    spoil(path, 1, 200)
    with pytest.raises(DataError, match=r"a.tfrecord"):
        take(source)
    path.unlink()
    assert source.where(1).startswith(str(path))


def test_damage_within_is_found_when_decoded(tmp_path):
    whole = [encoded(photo(60, 80, n)) for n in range(4)]
    cut = [whole[0], whole[1][:-300], whole[2], whole[3][:-300]]
    path = shard(tmp_path / "a.tfrecord", cut, [0, 1, 0, 1], [f"{n}.jpg" for n in range(4)])
    with pytest.raises(DataError, match=r"Premature end(.|\n)*a.tfrecord: byte [\d,]+ \(1.jpg"):
        take(rows(path))
    source = rows(path, on_error="skip", max_errors=2)
    for _ in range(3):
        block = take(source, [3, 2, 1, 0])
        assert block.numbers.tolist() == [2, 0]
        assert block.columns["label"].tolist() == [0, 0]
    assert source.notes()[0].startswith("2 bad rows skipped: ")
    with pytest.raises(DataError, match="max_errors is 1"):
        take(rows(path, on_error="skip", max_errors=1))


def test_labels_that_are_no_class(tmp_path):
    content = encoded(photo(20, 30))
    path = shard(tmp_path / "a.tfrecord", [content] * 3, [0, 2, 1], ["0.jpg", "1.jpg", "2.jpg"])
    with pytest.raises(DataError, match=r"0 to 1; found 2(.|\n)*a.tfrecord: byte [\d,]+ \(1.jpg\)"):
        rows(path, classes=CLASSES)
    for number in (-1, 1 << 40):
        path = shard(tmp_path / "b.tfrecord", [content], [number])
        with pytest.raises(DataError, match=rf"found {number:,}"):
            rows(path)


def test_records_of_other_kinds(tmp_path):
    content = encoded(photo(20, 30))
    path = shard(tmp_path / "a.tfrecord", [content])
    with pytest.raises(DataError, match=r"found image \(bytes\)(.|\n)*labels=False"):
        rows(path)
    numbers = np.zeros((1, 3), np.float32)
    write(path, bytes(example.encode({"image": numbers, "y": numbers})[0]))
    message = r"image \(bytes\), label \(int64\); found image \(float\), y \(float\)"
    with pytest.raises(DataError, match=message):
        rows(path)
    for content in (b"words, and no records", b"\xff" * 40, b"short"):
        write(path, content)
        with pytest.raises(DataError, match=r"a.tfrecord: byte 0"):
            rows(path)


def test_other_features_are_left_alone(tmp_path):
    others = {"height": np.full(2, 7, np.int64), "text": ragged([b"a", b"bc"])}
    path = shard(tmp_path / "a.tfrecord", [encoded(photo(20, 30))] * 2, [0, 1], **others)
    assert take(rows(path)).columns["image"].shape == (2, 3, 20, 30)


# -- threads, processes, pipelines, caches ---------------------------------------------------


def test_a_pipeline_of_shards_is_that_of_the_folder(pets, shards):
    ours = images(shards, size=32, classes=CLASSES).shuffle(seed=1).batch(2)
    theirs = images(pets, size=32).shuffle(seed=1).batch(2)
    for a, b in zip(ours.batches(0), theirs.batches(0), strict=True):
        assert torch.equal(a.inputs, b.inputs)
        assert torch.equal(a.targets, b.targets)
        assert torch.equal(a.indices, b.indices)


@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize("channels", [3, 1])
def test_a_cache_keeps_channels_last(pets, where, channels):
    plain = images(pets, size=32, channels=channels).shuffle(seed=1).batch(2)
    for cached in (plain.cache(where), plain.cache(where)):  # the second finds the first's folder
        for epoch in range(2):
            for ours, theirs in zip(cached.batches(epoch), plain.batches(epoch), strict=True):
                assert torch.equal(ours.inputs, theirs.inputs)
                assert in_channels_last(ours.inputs)


def test_rows_of_a_block_stay_channels_last():
    image = np.arange(2 * 3 * 4 * 5).reshape(2, 4, 5, 3).transpose(0, 3, 1, 2)
    for found, wanted in (
        (take_values(image, np.array([1, 0, 1])), image[[1, 0, 1]]),
        (join([Block({"x": image}, np.arange(2))] * 2).columns["x"], image[[0, 1, 0, 1]]),
    ):
        np.testing.assert_array_equal(found, wanted)
        assert is_channels_last(found)
    assert not is_channels_last(np.ascontiguousarray(image))
    assert not is_channels_last(image[:, :, ::2])


def test_a_row_cache_keeps_channels_last(pets, tmp_path):
    from flatout.data.sources.records.rows import rows as row_cache

    source = images(pets, size=32)
    done = convert(source, tmp_path / "pets.rows", progress=False)
    (ours,), (theirs,) = (
        pipeline.batch(5).batches(0) for pipeline in (row_cache(done.files[0]), source)
    )
    assert torch.equal(ours.inputs, theirs.inputs)
    assert in_channels_last(ours.inputs)
