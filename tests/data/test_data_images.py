from __future__ import annotations

import io
import math
import os
import pickle
import shutil
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from zlib import compress, crc32

import fsspec
import numpy as np
import pytest
import torch
from data_photographs import encoded, exif, photo, psnr, write
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.data.reading.buffers import Buffers
from flatout.data.reading.schema import Schema
from flatout.data.sources.images import image_decode
from flatout.data.sources.images.images import images
from flatout.errors import DataError

Image = pytest.importorskip("PIL.Image")
ImageOps = pytest.importorskip("PIL.ImageOps")
simplejpeg = pytest.importorskip("simplejpeg")

_BILINEAR = Image.Resampling.BILINEAR


@pytest.fixture
def pets(tmp_path):
    """Three cats, two dogs."""
    for number in range(5):
        name = f"{'cat' if number < 3 else 'dog'}/{number}.jpg"
        write(tmp_path / "pets" / name, encoded(photo(120, 160, number)))
    return tmp_path / "pets"


def rows(*args, **options):
    return images(*args, **options).origin


def take(source, numbers=None):
    wanted = range(source.rows) if numbers is None else numbers
    return source.take(np.array(wanted, np.int64), Buffers())


def pixels(source):
    """Of all rows, as (rows, height, width, channels)."""
    return take(source).columns["image"].transpose(0, 2, 3, 1)


def one(tmp_path, content, name="a.jpg", **options):
    """The only image of a folder, as (height, width, channels)."""
    write(tmp_path / "one" / name, content)
    return pixels(rows(tmp_path / "one", labels=False, **options))[0]


def result_of(function, *args, **options):
    """What it returns and "", or None and what it says is wrong."""
    try:
        return function(*args, **options), ""
    except DataError as error:
        return None, str(error)


def by_pillow(content, mode="RGB"):
    return ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert(mode)


# -- folders ---------------------------------------------------------------------------------


def test_classes_come_from_folders_and_pixels_from_files(pets):
    source = rows(pets)
    block = take(source, [4, 0, 2])
    assert source.rows == 5
    assert source.classes == ("cat", "dog")
    assert source.targets().tolist() == [0, 0, 0, 1, 1]
    assert block.numbers.tolist() == [4, 0, 2]
    assert block.columns["label"].tolist() == [1, 0, 0]
    assert block.columns["label"].dtype == np.int64
    for place, name in enumerate(("dog/4.jpg", "cat/0.jpg", "cat/2.jpg")):
        expected = by_pillow((pets / name).read_bytes())
        np.testing.assert_array_equal(
            block.columns["image"][place].transpose(1, 2, 0), np.asarray(expected)
        )


def test_a_batch_is_channels_last_without_a_copy(pets):
    image = take(rows(pets)).columns["image"]
    assert image.shape == (5, 3, 120, 160)
    assert image.dtype == np.uint8
    assert torch.from_numpy(image).is_contiguous(memory_format=torch.channels_last)


def test_it_says_what_it_is(pets):
    source = rows(pets, size=64)
    assert source.describe() == "5 images of 3x64x64, 2 classes (cat 3, dog 2)"
    assert source.where(3).endswith("dog/3.jpg")
    assert source.lengths() is None
    assert source.random
    assert source.notes() == []


def test_images_may_lie_deeper_and_other_files_are_named(pets, monkeypatch):
    shutil.copy(pets / "cat/0.jpg", write(pets / "cat/old/x.JPG", b""))
    write(pets / "cat/readme.txt", b"words")
    write(pets / "cat/.hidden.jpg", b"")
    write(pets / ".ipynb_checkpoints/a.jpg", b"")
    write(pets / "__MACOSX/cat/a.jpg", b"")
    monkeypatch.chdir(pets)
    source = rows(pets)
    assert source.targets().tolist() == [0, 0, 0, 0, 1, 1]
    assert source.where(3) == "cat/old/x.JPG"
    assert source.notes() == ["1 file not read, by name no image: cat/readme.txt"]


def test_links_are_followed_but_not_in_circles(pets, tmp_path):
    (pets / "dog/all").symlink_to(pets / "dog")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/cat").symlink_to(pets / "cat")
    assert rows(pets).rows == 5
    assert rows(tmp_path / "linked").rows == 3


def test_without_labels_images_lie_anywhere(pets, tmp_path):
    shutil.copy(pets / "cat/0.jpg", pets / "top.jpg")
    source = rows(pets, labels=False)
    assert source.rows == 6
    assert source.targets() is None
    assert set(take(source).columns) == {"image"}
    assert source.describe() == "6 images of 3x120x160"


def test_the_order_of_classes_is_given(pets):
    source = rows(pets, classes=["horse", "dog", "cat"])
    assert source.targets().tolist() == [2, 2, 2, 1, 1]
    assert source.notes() == ["classes without an image: horse"]


def test_an_empty_class_folder_keeps_its_number(pets):
    (pets / "ant").mkdir()
    source = rows(pets)
    assert source.classes == ("ant", "cat", "dog")
    assert source.targets().tolist() == [1, 1, 1, 2, 2]


def test_patterns_and_lists_take_the_folder_a_file_is_in(pets):
    by_pattern = rows(str(pets / "*" / "*.jpg"))
    by_list = rows([pets / "dog/3.jpg", pets / "cat/1.jpg"])
    assert by_pattern.targets().tolist() == [0, 0, 0, 1, 1]
    assert by_list.targets().tolist() == [1, 0]
    np.testing.assert_array_equal(pixels(by_list), pixels(rows(pets))[[3, 1]])
    assert rows(f"file://{pets}").digest == rows(pets).digest


def test_folders_elsewhere_are_brought_here(pets):
    fs = fsspec.filesystem("memory")
    for file in pets.rglob("*.jpg"):
        fs.pipe(f"/shop/{file.relative_to(pets)}", file.read_bytes())
    fs.pipe("/shop/cat/list.csv", b"a,b")
    try:
        source = rows("memory://shop")
        assert source.targets().tolist() == [0, 0, 0, 1, 1]
        np.testing.assert_array_equal(pixels(source), pixels(rows(pets)))
        assert "memory://" in source.where(0)
        assert source.digest == rows(pets).digest
    finally:
        fs.rm("/shop", recursive=True)


def test_the_digest_follows_the_content_not_the_place(pets, tmp_path):
    first = rows(pets).digest
    shutil.copytree(pets, tmp_path / "elsewhere")
    assert rows(tmp_path / "elsewhere").digest == first
    assert rows(pets, size=32).digest != first
    (pets / "cat/0.jpg").write_bytes(encoded(photo(120, 160, 9)))
    assert rows(pets).digest != first


# -- pixels ----------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("size", [(90, 100), (56, 56), (240, 200), (300, 100)])
def test_resizing_is_pillows_antialiased_bilinear(tmp_path, size, channels):
    content = encoded(photo(200, 240))
    image = by_pillow(content)
    if channels == 1:
        image = Image.open(io.BytesIO(content))
        image.draft("L", None)
    expected = np.asarray(image.resize(size[::-1], _BILINEAR)).reshape(*size, channels)
    found = one(tmp_path, content, size=size, channels=channels)
    assert psnr(found, expected) > 65
    stored = one(tmp_path, content, channels=channels)
    assert psnr(image_decode._resized(stored, size, by_torch=False), expected) > 65


def test_crop_uses_the_middle(tmp_path):
    wide, tall = encoded(photo(100, 300)), encoded(photo(300, 100))
    expected = by_pillow(wide).crop((75, 0, 225, 100)).resize((60, 40), _BILINEAR)
    found = one(tmp_path, wide, size=(40, 60), resize="crop")
    assert psnr(found, np.asarray(expected)) > 65
    expected = by_pillow(tall).crop((0, 100, 100, 200)).resize((50, 50), _BILINEAR)
    found = one(tmp_path, tall, size=50, resize="crop")
    assert psnr(found, np.asarray(expected)) > 65


def test_fit_leaves_a_black_margin(tmp_path):
    content = encoded(photo(100, 300))
    found = one(tmp_path, content, size=90, resize="fit")
    assert not found[:30].any()
    assert not found[60:].any()
    inside = np.asarray(by_pillow(content).resize((90, 30), _BILINEAR))
    assert psnr(found[30:60], inside) > 65


@given(
    st.tuples(st.integers(1, 90), st.integers(1, 90)),
    st.tuples(st.integers(1, 90), st.integers(1, 90)),
    st.sampled_from(["stretch", "crop", "fit"]),
    st.booleans(),
    st.integers(1, 8),
    st.sampled_from([1, 3]),
)
@settings(deadline=None, max_examples=80)
def test_any_size_becomes_any_other(
    tmp_path_factory, stored, size, resize, reduced, orientation, channels
):
    folder = tmp_path_factory.mktemp("any")
    array = np.full((*stored, 3), 200, np.uint8)
    content = encoded(array, exif=exif(orientation))
    found = one(folder, content, size=size, resize=resize, reduced=reduced, channels=channels)
    assert found.shape == (*size, channels)
    # Gray stays gray, and only a margin is black.
    assert set(np.unique(found).tolist()) <= {0, 199, 200, 201}
    if resize != "fit":
        assert found.min() > 0
    else:
        assert found.any()


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(
    "details",
    [{}, {"order": ">"}, {"order": ">", "kind": 4, "before": 3}, {"before": 400}],
    ids=["little endian", "big endian", "long", "behind 4 KiB"],
)
def test_images_are_upright(tmp_path, orientation, details):
    content = encoded(photo(60, 90), exif=exif(orientation, **details))
    expected = by_pillow(content)
    found = one(tmp_path, content)
    np.testing.assert_array_equal(found, np.asarray(expected))
    small = one(tmp_path, content, size=(41, 33))
    # Rows and columns are rounded in another order than where an image is turned first.
    assert psnr(small, np.asarray(expected.resize((33, 41), _BILINEAR))) > 45


@pytest.mark.parametrize("orientation", range(1, 9))
def test_upright_images_are_cropped_and_reduced_alike(tmp_path, orientation):
    content = encoded(photo(240, 320, enlarged=3), exif=exif(orientation))
    upright = encoded(by_pillow(content), "PNG")
    for resize in ("crop", "fit"):
        options = {"size": (60, 40), "resize": resize}
        expected = one(tmp_path / resize, upright, **options)
        assert psnr(one(tmp_path, content, **options), expected) > 45
        assert psnr(one(tmp_path, content, reduced=True, **options), expected) > 38


@pytest.mark.parametrize("cut", [6, 12, 14, 20, 25])
def test_exif_data_cut_short_turn_nothing(tmp_path, cut):
    content = encoded(photo(20, 30), exif=exif(6)[:cut])
    assert one(tmp_path, content).shape == (20, 30, 3)


def test_an_orientation_that_exif_does_not_know_turns_nothing(tmp_path):
    content = encoded(photo(20, 30), exif=exif(9))
    assert one(tmp_path, content).shape == (20, 30, 3)


@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("PNG", {}),
        ("BMP", {}),
        ("TIFF", {}),
        ("PPM", {}),
        ("WEBP", {"lossless": True}),
        ("JPEG", {"progressive": True}),
        ("JPEG", {"subsampling": 0}),
        ("JPEG", {"restart_marker_rows": 1}),
    ],
)
def test_formats_are_known_by_content_not_by_name(tmp_path, form, options):
    content = encoded(photo(50, 70), form, **options)
    np.testing.assert_array_equal(one(tmp_path, content), np.asarray(by_pillow(content)))


@pytest.mark.parametrize("form", ["PNG", "TIFF", "WEBP"])
def test_other_formats_are_turned_upright_too(tmp_path, form):
    content = encoded(photo(50, 70), form, exif=exif(6))
    found = one(tmp_path, content)
    assert found.shape == (70, 50, 3)
    np.testing.assert_array_equal(found, np.asarray(by_pillow(content)))


@pytest.mark.parametrize("mode", ["L", "LA", "P", "1", "RGBA", "CMYK"])
@pytest.mark.parametrize("channels", [3, 1])
def test_colors_are_converted_as_pillow_does(tmp_path, mode, channels):
    image = Image.fromarray(photo(50, 70)).convert(mode)
    if mode in ("LA", "RGBA"):
        image.putalpha(Image.fromarray(photo(50, 70, 3)[:, :, 0]))
    content = encoded(image, "JPEG" if mode in ("L", "CMYK") else "PNG")
    expected = np.asarray(by_pillow(content, "RGB" if channels == 3 else "L"))
    found = one(tmp_path, content, channels=channels)
    np.testing.assert_array_equal(found, expected.reshape(50, 70, channels))


def test_a_transparent_palette_shows_its_colors(tmp_path):
    image = Image.fromarray(photo(20, 20)).convert("P")
    content = encoded(image, "PNG", transparency=3)
    np.testing.assert_array_equal(one(tmp_path, content), np.asarray(by_pillow(content)))


@pytest.mark.parametrize("form", ["PNG", "TIFF", "PPM"])
def test_16_bits_are_cut_to_the_upper_8(tmp_path, form):
    wide = (photo(40, 50)[:, :, 0].astype(np.uint16) << 8) + 77
    found = one(tmp_path, encoded(wide, form), channels=1)
    np.testing.assert_array_equal(found[:, :, 0], wide >> 8)


def png_of_16_bits(pixels):
    def chunk(kind, data):
        return struct.pack(">I4s", len(data), kind) + data + struct.pack(">I", crc32(kind + data))

    header = struct.pack(">IIBBBBB", *pixels.shape[1::-1], 16, 2, 0, 0, 0)
    data = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    parts = [(b"IHDR", header), (b"IDAT", compress(data)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


def test_the_first_image_that_loses_bits_or_transparency_is_named_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    colors = photo(20, 30)
    opaque, clear = (Image.fromarray(colors).convert("RGBA") for _ in range(2))
    clear.putpixel((3, 4), (1, 2, 3, 254))
    wide = png_of_16_bits((colors.astype(np.uint16) << 8) + 77)
    images = [encoded(opaque, "PNG"), encoded(clear, "PNG"), wide]
    for number, content in enumerate([*images, *images]):
        write(tmp_path / f"{number}.png", content)
    source = rows(tmp_path, labels=False)
    for _ in range(2):
        np.testing.assert_array_equal(pixels(source)[[0, 2]], [colors, colors])
    lines = source.skipped()
    assert lines == [
        "1.png: its transparency is dropped",
        "2.png: its values of 16 bits are cut to their upper 8 bits",
    ]
    assert source.skipped() == []
    assert source.notes() == lines


def test_floating_point_pixels_are_refused(tmp_path):
    image = Image.fromarray(photo(20, 30)[:, :, 0].astype(np.float32))
    with pytest.raises(DataError, match=r"expected whole numbers as pixels(.|\n)*a.jpg"):
        one(tmp_path, encoded(image, "TIFF"))


def test_programs_in_images_are_not_run(tmp_path):
    with pytest.raises(DataError, match="no image"):
        one(tmp_path, b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n")


# -- reduced decode --------------------------------------------------------------------------


def test_reduced_decode_is_close_to_the_full_one(tmp_path):
    # Photographs of 427x640, enlarged by 2.5 and cut to the size of the measurements in the docs.
    for number in range(4):
        content = encoded(photo(496, 512, number, enlarged=2.5))
        write(tmp_path / "all" / f"{number}.jpg", content)
    source = rows(tmp_path / "all", labels=False, size=224, reduced=True)
    reference = [
        np.asarray(
            by_pillow((tmp_path / "all" / f"{n}.jpg").read_bytes()).resize((224, 224), _BILINEAR)
        )
        for n in range(4)
    ]
    found = pixels(source)
    assert psnr(found, np.stack(reference)) > 43
    full = pixels(rows(tmp_path / "all", labels=False, size=224))
    assert math.isfinite(psnr(found, full))


@pytest.mark.parametrize("channels", [3, 1])
def test_what_little_is_left_to_shrink_is_interpolated(tmp_path, channels):
    content = encoded(photo(496, 512, 1, enlarged=2.5))
    options = {"size": 224, "channels": channels}
    full = one(tmp_path, content, **options)
    quick = one(tmp_path, content, reduced=True, **options)
    far = one(tmp_path, content, size=150, reduced=True)
    half = Image.open(io.BytesIO(content))
    half.draft("RGB" if channels == 3 else "L", (256, 248))
    antialiased = np.asarray(half.resize((224, 224), _BILINEAR)).reshape(224, 224, channels)
    assert psnr(quick, full) > 42
    assert psnr(antialiased, full) > psnr(quick, full)
    assert psnr(antialiased, quick) < 65  # it was interpolated, not antialiased
    # Further to go, so that it is antialiased anyway.
    half = Image.open(io.BytesIO(content))
    half.draft("RGB", (256, 248))
    assert psnr(far, np.asarray(half.resize((150, 150), _BILINEAR))) > 55


@pytest.mark.parametrize("size", [300, 330])
def test_resizing_starts_no_threads(tmp_path, size):
    write(tmp_path / "all/a.jpg", encoded(photo(2 * size, 2 * size + 60, enlarged=2)))
    before = len(os.listdir("/proc/self/task"))
    take(rows(tmp_path / "all", labels=False, size=size, reduced=True), [0] * 4)
    assert len(os.listdir("/proc/self/task")) <= before


@pytest.mark.parametrize(
    ("stored", "size", "resize", "expected"),
    [
        ((496, 512), (224, 224), "stretch", (248, 256)),
        ((420, 400), (224, 224), "stretch", (420, 400)),
        ((448, 448), (224, 224), "stretch", (224, 224)),
        ((447, 448), (224, 224), "stretch", (224, 224)),
        ((446, 448), (224, 224), "stretch", (446, 448)),
        ((3000, 4000), (224, 224), "stretch", (375, 500)),
        ((300, 3000), (224, 224), "stretch", (300, 3000)),
        ((300, 3000), (224, 224), "fit", (38, 375)),
        ((600, 3000), (224, 224), "crop", (300, 1500)),
    ],
)
def test_reduced_by_halves_and_never_below_the_result(stored, size, resize, expected):
    header = image_decode.Header(*stored, 1, True, 1, 0)
    look = image_decode.ImageForm(size, resize, 3, True)
    assert image_decode.scratch_bytes(header, look) == 3 * expected[0] * expected[1]


# -- without the fast libraries --------------------------------------------------------------


@pytest.fixture
def without_simplejpeg(monkeypatch):
    monkeypatch.setattr(image_decode, "simplejpeg", None)


@pytest.mark.parametrize(
    "options",
    [{}, {"size": 70}, {"channels": 1}, {"size": 50, "reduced": True}],
    ids=["as stored", "resized", "gray", "reduced"],
)
def test_pillow_alone_gives_the_same(pets, request, options):
    write(pets / "dog/turned.jpg", encoded(photo(160, 120), exif=exif(6)))
    with_it = pixels(rows(pets, **options))
    request.getfixturevalue("without_simplejpeg")
    source = rows(pets, **options)
    assert psnr(pixels(source), with_it) > 55
    assert any("simplejpeg is absent" in note for note in source.notes())


def test_pillow_alone_notices_truncation(pets, without_simplejpeg):
    path = pets / "cat/1.jpg"
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(DataError, match=r"truncated(.|\n)*cat/1.jpg"):
        pixels(rows(pets))


def test_what_libjpeg_frowns_at_pillow_may_read(tmp_path):
    content = bytearray(encoded(photo(30, 40)))
    content[11] = 9  # JFIF version 9
    with pytest.raises(ValueError, match="JFIF"):
        simplejpeg.decode_jpeg(bytes(content))
    np.testing.assert_array_equal(
        one(tmp_path, bytes(content)), np.asarray(by_pillow(bytes(content)))
    )


# -- bad input -------------------------------------------------------------------------------


def test_no_images_at_all(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"holds no images(.|\n)*empty"):
        rows(tmp_path / "empty")
    write(tmp_path / "text/a.txt", b"a")
    with pytest.raises(DataError, match=r"such as .*a\.txt"):
        rows(tmp_path / "text")
    with pytest.raises(DataError, match=r"there is no file .*nowhere"):
        rows(tmp_path / "nowhere")
    with pytest.raises(DataError, match="empty list"):
        rows([])


def test_images_without_class_folders(pets):
    with pytest.raises(DataError, match=r"folder for each class, but 0.jpg and(.|\n)*labels=False"):
        rows(pets / "cat")
    shutil.copy(pets / "cat/0.jpg", pets / "loose.jpg")
    with pytest.raises(DataError, match=r"loose\.jpg is in no class folder"):
        rows(pets)


def test_a_folder_that_is_no_class(pets):
    with pytest.raises(DataError, match=r"expected the classes cat, horse; found .*'dog'"):
        rows(pets, classes=["cat", "horse"])


def test_images_of_two_sizes(pets, monkeypatch):
    write(pets / "dog/z.jpg", encoded(photo(120, 161)))
    monkeypatch.chdir(pets)
    with pytest.raises(
        DataError, match=r"120 x 160 in cat/0.jpg, 120 x 161 in dog/z.jpg(.|\n)*size="
    ):
        rows(pets)
    assert rows(pets, size=64).rows == 6


_BAD = {
    "empty": (b"", "0 bytes"),
    "html": (
        b"<!DOCTYPE html><html>Not found</html>",
        "no image, or damaged in its header: it begins with 3c 21 44",
    ),
    "no more than a start": (b"\xff\xd8", "expected a segment at byte 2, found the end"),
    "no frame": (b"\xff\xd8\xff\xda\0\x08", "expected its size before byte 2"),
    "zeros in the header": (b"\xff\xd8" + bytes(50), "expected a segment at byte 2"),
    "segment of no length": (b"\xff\xd8\xff\xe0\0\0", "expected its size"),
    "fill bytes forever": (b"\xff\xd8" + b"\xff" * 5000, "no size in its first"),
    "no rows": (b"\xff\xd8\xff\xc0\0\x11\x08\0\0\0\x20\x03", "1 to .* pixels, found 0 x 32"),
    "too many pixels": (
        b"\xff\xd8\xff\xc0\0\x11\x08\xff\xff\xff\xff\x03",
        "found 65,535 x 65,535",
    ),
    "cut in the frame": (b"\xff\xd8\xff\xc0\0\x11\x08", "truncated within its header"),
    "png of nothing": (b"\x89PNG\r\n\x1a\n", "damaged|no image"),
}


@pytest.mark.parametrize(("content", "message"), _BAD.values(), ids=_BAD.keys())
def test_known_bad_when_opened(pets, content, message):
    write(pets / "dog/bad.jpg", content)
    with pytest.raises(DataError, match=rf"{message}(.|\n)*dog/bad.jpg(.|\n)*on_error=\"skip\""):
        rows(pets)
    source = rows(pets, on_error="skip")
    assert source.rows == 5
    assert source.targets().tolist() == [0, 0, 0, 1, 1]
    assert "1 bad row skipped" in source.notes()[0]
    assert "dog/bad.jpg" in source.notes()[0]


def test_how_many_are_bad_is_said(pets):
    for number in range(3):
        write(pets / "dog" / f"bad{number}.png", b"")
    with pytest.raises(DataError, match=r"3 of 8 images .*the first: it is empty"):
        rows(pets)
    with pytest.raises(DataError, match="max_errors is 2"):
        rows(pets, on_error="skip", max_errors=2)
    assert rows(pets, on_error="skip", max_errors=3).rows == 5


def test_no_image_is_good(tmp_path):
    write(tmp_path / "one/a.jpg", b"")
    with pytest.raises(DataError, match="none of the images can be read"):
        rows(tmp_path / "one", labels=False, on_error="skip")


def test_what_is_no_file(pets):
    (pets / "dog/gone.jpg").symlink_to(pets / "nowhere.jpg")
    with pytest.raises(DataError, match=r"cannot be opened: No such file(.|\n)*gone.jpg"):
        rows(pets)
    (pets / "dog/gone.jpg").unlink()
    os.mkfifo(pets / "dog/pipe.jpg")
    with pytest.raises(DataError, match=r"expected a file(.|\n)*pipe.jpg"):
        rows(pets)


@given(st.floats(0, 1), st.booleans())
@settings(deadline=None, max_examples=60)
def test_a_truncated_jpeg_is_never_half_gray(tmp_path_factory, share, progressive):
    whole = encoded(photo(64, 80), progressive=progressive)
    content = whole[: int(share * (len(whole) - 1))]
    with pytest.raises(DataError, match=r"a\.jpg"):
        one(tmp_path_factory.mktemp("cut"), content, size=32)


@given(st.floats(0, 1), st.sampled_from(["PNG", "TIFF", "WEBP", "BMP", "CMYK"]))
@settings(deadline=None, max_examples=60)
def test_a_truncated_file_is_an_error_or_whole(tmp_path_factory, share, form):
    image = Image.fromarray(photo(64, 80))
    whole = encoded(image.convert("CMYK")) if form == "CMYK" else encoded(image, form)
    content = whole[: int(share * len(whole))]
    found, error = result_of(one, tmp_path_factory.mktemp("cut"), content)
    if error:
        assert "a.jpg" in error
    else:
        # Only what comes behind the pixels may be missing.
        np.testing.assert_array_equal(found, np.asarray(by_pillow(whole)))


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=20))
@settings(deadline=None, max_examples=100)
def test_damaged_bytes_never_crash(tmp_path_factory, damage):
    content = bytearray(encoded(photo(64, 80), exif=exif(6)))
    for share, value in damage:
        content[int(share * (len(content) - 1))] = value
    found, error = result_of(one, tmp_path_factory.mktemp("damaged"), bytes(content), size=40)
    assert "a.jpg" in error if error else found.shape == (40, 40, 3)


def test_damage_within_is_found_when_decoded(pets):
    path = pets / "cat/1.jpg"
    content = bytearray(path.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 2] = b"\xff\xd9"  # the end, in the middle
    path.write_bytes(bytes(content))
    source = rows(pets)
    assert len(take(source, [0, 2])) == 2
    with pytest.raises(DataError, match=r"the JPEG is damaged: (.|\n)*cat/1.jpg"):
        take(source)
    # Not skipped in silence the second time.
    with pytest.raises(DataError, match="damaged"):
        take(source, [1])


def test_a_changed_byte_among_the_pixels_of_a_png_is_found(tmp_path):
    # Without compression, the pixels can be decoded with any value of the byte.
    content = bytearray(encoded(photo(40, 40), "PNG", compress_level=0))
    content[len(content) // 2] ^= 16
    found, error = result_of(one, tmp_path, bytes(content), size=40)
    assert found is None
    assert "the PNG is damaged: chunk b'IDAT' at byte" in error


def test_damage_is_skipped_and_counted_once(pets):
    path = pets / "cat/1.jpg"
    path.write_bytes(path.read_bytes()[:-300])
    source = rows(pets, on_error="skip", max_errors=1)
    assert source.rows == 5
    for _ in range(3):
        block = take(source, [4, 1, 0])
        assert block.numbers.tolist() == [4, 0]
        assert block.columns["label"].tolist() == [1, 0]
        np.testing.assert_array_equal(block.columns["image"], take(source, [4, 0]).columns["image"])
    (note,) = source.notes()
    assert note.startswith("1 bad row skipped")
    assert "Premature end of JPEG file" in note
    (pets / "cat/2.jpg").unlink()
    with pytest.raises(DataError, match="max_errors is 1"):
        take(source)


def test_a_block_of_bad_rows_alone_is_empty(pets):
    for path in (pets / "cat").iterdir():
        path.write_bytes(path.read_bytes()[:-300])
    block = take(rows(pets, on_error="skip"), [0, 1, 2])
    assert len(block) == 0
    assert block.columns["image"].shape == (0, 3, 120, 160)
    assert block.columns["label"].shape == (0,)


@pytest.mark.parametrize("skips", [False, True])
def test_a_file_that_goes_or_is_damaged_while_it_is_read(pets, skips):
    source = rows(pets, **({"on_error": "skip"} if skips else {}))
    (pets / "dog/3.jpg").unlink()
    path = pets / "cat/0.jpg"
    path.write_bytes(path.read_bytes()[:-300])
    (pets / "cat/1.jpg").write_bytes(b"a page of text")
    (pets / "dog/4.jpg").write_bytes(b"")
    other = pets / "cat/2.jpg"
    other.write_bytes(b"\xff" * other.stat().st_size)
    bad = {
        3: r"can no longer be read: No such file(.|\n)*dog/3.jpg",
        0: r"has changed since it was opened: it had (.|\n)*cat/0.jpg",
        2: r"it begins with other bytes(.|\n)*cat/2.jpg",
        1: r"has changed since it was opened: (.|\n)*cat/1.jpg",
        4: r"it had [\d,]+ bytes, now 0(.|\n)*dog/4.jpg",
    }
    if skips:
        assert take(source).numbers.tolist() == []
        (line,) = source.skipped()
        assert line.startswith("5 bad rows skipped: ")
    for number in () if skips else bad:
        with pytest.raises(DataError, match=bad[number]):
            take(source, [number])


# -- many threads, other processes, schemas, pipelines ---------------------------------------


def test_threads_give_what_one_gives(pets):
    source, buffers = rows(pets, size=(50, 60)), Buffers()
    orders = [np.random.default_rng(seed).integers(0, 5, 40) for seed in range(8)]
    whole = take(source)
    with ThreadPoolExecutor(4) as pool:
        blocks = list(pool.map(lambda order: source.take(order, buffers), orders))
    for order, block in zip(orders, blocks, strict=True):
        np.testing.assert_array_equal(block.columns["image"], whole.columns["image"][order])
        np.testing.assert_array_equal(block.columns["label"], whole.columns["label"][order])


def test_another_process_reads_the_same(pets, tmp_path):
    source = rows(pets, size=(50, 60), on_error="skip")
    (tmp_path / "source").write_bytes(pickle.dumps(source))
    script = (
        "import pickle, sys, numpy as np\n"
        "from flatout.data.reading.buffers import Buffers\n"
        "source = pickle.load(open(sys.argv[1], 'rb'))\n"
        "np.save(sys.argv[2], source.take(np.arange(5), Buffers()).columns['image'])\n"
    )
    arguments = [str(tmp_path / "source"), str(tmp_path / "found.npy")]
    subprocess.run([sys.executable, "-c", script, *arguments], check=True, timeout=120)
    np.testing.assert_array_equal(np.load(tmp_path / "found.npy"), take(source).columns["image"])


def test_a_schema_says_it_all(pets, tmp_path):
    first = rows(
        pets, size=(40, 50), resize="crop", channels=1, reduced=True, classes=["dog", "cat"]
    )
    first.schema.dump(tmp_path / "schema.toml")
    second = rows(pets, schema=tmp_path / "schema.toml")
    assert second.schema == first.schema
    assert second.digest == first.digest
    np.testing.assert_array_equal(pixels(second), pixels(first))
    assert second.targets().tolist() == [1, 1, 1, 0, 0]
    with pytest.raises(DataError, match=r"size, labels: the schema says"):
        rows(pets, schema=tmp_path / "schema.toml", size=3, labels=False)


def test_a_schema_without_resizing_wants_that_size(pets, tmp_path):
    schema = rows(pets).schema
    assert schema["image"].shape == (3, 120, 160)
    write(tmp_path / "val/dog/a.jpg", encoded(photo(120, 150)))
    with pytest.raises(DataError, match=r"120 x 160 in the schema, 120 x 150 in .*a.jpg"):
        rows(tmp_path / "val", schema=schema)
    write(tmp_path / "val/dog/a.jpg", encoded(photo(120, 160)))
    assert rows(tmp_path / "val", schema=schema).targets().tolist() == [1]


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"columns": [{"name": "label", "dtype": "int64"}]}, "image, and label or not"),
        ({"columns": [{"name": "image", "dtype": "float32", "shape": [3, 4, 4]}]}, "uint8"),
        ({"columns": [{"name": "image", "dtype": "uint8", "shape": [4, 4]}]}, "3 or 1 channels"),
        (
            {
                "columns": [
                    {"name": "image", "dtype": "uint8", "shape": [3, 4, 4]},
                    {"name": "label", "dtype": "float32", "role": "target"},
                ]
            },
            "one int64 number",
        ),
        (
            {
                "columns": [{"name": "image", "dtype": "uint8", "shape": [3, 4, 4]}],
                "options": {"filter": "lanczos"},
            },
            "found filter",
        ),
        (
            {
                "columns": [{"name": "image", "dtype": "uint8", "shape": [3, 4, 4]}],
                "options": {"resize": "squash"},
            },
            "'stretch', 'crop' or 'fit'",
        ),
    ],
)
def test_schemas_that_make_no_sense(pets, schema, message):
    with pytest.raises(DataError, match=message):
        rows(pets, schema=Schema.model_validate({"format": "images", **schema}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "size: expected"),
        ({"size": (3, 4, 5)}, "size: expected"),
        ({"size": 2.5}, "size: expected"),
        ({"size": 70_000}, "size: expected"),
        ({"size": 9, "resize": "squash"}, "resize: expected"),
        ({"channels": 4}, "channels: expected"),
        ({"reduced": True}, "reduced wants a size"),
        ({"classes": "cat"}, "classes: expected"),
        ({"classes": ["cat", "cat", "dog"]}, "different names"),
        ({"on_error": "ignore"}, "on_error"),
    ],
)
def test_arguments_that_make_no_sense(pets, options, message):
    with pytest.raises(DataError, match=message):
        images(pets, **options)


def test_a_pipeline_of_images(pets):
    pipeline = images(pets, size=32).shuffle(seed=1).batch(2)
    batches = list(pipeline.batches(0))
    assert [batch.size for batch in batches] == [2, 2, 1]
    assert batches[0].inputs.shape == (2, 3, 32, 32)
    assert batches[0].inputs.dtype == torch.uint8
    whole = take(rows(pets, size=32))
    for batch in batches:
        np.testing.assert_array_equal(
            batch.inputs.numpy(), whole.columns["image"][batch.indices.numpy()]
        )
        np.testing.assert_array_equal(
            batch.targets.numpy(), whole.columns["label"][batch.indices.numpy()]
        )


def doubled(image, label):
    return image // 2, label


@pytest.mark.parametrize("stages", ["", "map", "map and cache"])
def test_a_pipeline_goes_on_without_damaged_images(pets, stages):
    for name in ("cat/0.jpg", "dog/3.jpg"):
        path = pets / name
        path.write_bytes(path.read_bytes()[:-300])
    pipeline = images(pets, size=32, on_error="skip").shuffle(seed=1)
    if stages:
        pipeline = pipeline.map(doubled)
    if stages.endswith("cache"):
        pipeline = pipeline.cache("memory")
    for size in (1, 2):
        pipeline_of = pipeline.batch(size)
        for epoch in (0, 1):  # what a batch has none of is filled up, though the first image is bad
            batches = list(pipeline_of.batches(epoch))
            numbers = [int(n) for b in batches for n in b.indices[: b.samples]]
            assert sorted(numbers) == [1, 2, 4]
            assert {b.inputs.shape[1:] for b in batches} == {(3, 32, 32)}
    (line,) = pipeline.skipped()
    assert line.count("Premature end of JPEG file") == 1
    assert line.startswith("2 bad rows skipped: ")


@pytest.mark.slow
def test_what_processes_skip_is_told_here(pets):
    path = pets / "cat/1.jpg"
    path.write_bytes(path.read_bytes()[:-300])
    made = images(pets, size=32, on_error="skip").map(doubled).batch(2).options(processes=1)
    for epoch in range(2):
        assert sum(batch.samples for batch in made.batches(epoch)) == 4
    made._program.pool.close()
    (line,) = made.skipped()
    assert line.startswith("1 bad row skipped: ")
