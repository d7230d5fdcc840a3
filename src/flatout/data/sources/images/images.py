"""Images in folders or TFRecord shards: JPEG, PNG and other formats that Pillow reads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, get_args

from flatout.data.pipeline import Pipeline
from flatout.data.reading.error_policy import ErrorPolicy, OnError
from flatout.data.reading.files import Paths
from flatout.data.reading.schema import Given, Schema, as_schema
from flatout.data.sources.images.image_decode import HAVE_PILLOW, Resize
from flatout.data.sources.images.image_files import ImageFolders, check_no_splits, find_images
from flatout.data.sources.images.image_records import ImageRecords
from flatout.data.sources.images.image_rows import ImageOptions, ImageRows, Images
from flatout.errors import DataError

# Suffixes of TFRecord files.
_RECORDS = (".tfrecord", ".tfrecords", ".tfrec")


def images(
    paths: Paths,
    *,
    size: int | tuple[int, int] | None = None,
    resize: Resize = "stretch",
    channels: int = 3,
    classes: Sequence[str] | None = None,
    labels: bool = True,
    reduced: bool = False,
    records: bool | None = None,
    on_error: OnError = "fail",
    max_errors: int = 100,
    schema: Given | None = None,
) -> Pipeline:
    """Read images from files, with the class from the folder, or from TFRecord shards.

    Images are uint8 of shape (channels, height, width). A batch is in channels_last memory, as the
    decoder writes it and as convolutions run fastest. Images are turned upright by their Exif
    orientation. As with Pillow's `convert("RGB")`, gray and CMYK become RGB, and transparency is
    dropped. Of values of 16 bits, the upper 8 bits stay (Pillow would clip bright parts of 16-bit
    gray). The first image of an animation is used.

    The header of every image is read at once, so that empty, foreign and damaged files are found
    before training starts. Damage inside is found when an image is decoded. A file that is written
    or replaced later counts as damaged.

    A record of a shard is a tf.train.Example of `image` (the bytes of an image file), `label` (one
    int64) and, optionally, `path` (bytes, for messages). `flatout data convert` makes such shards.
    Shards are read through once, when they are first opened. The facts in the headers are kept with
    the index in the cache folder.

    Args:
        paths: a folder, with a folder for each class in it, where images may be in subfolders. Or
            whatever `files.find` takes: patterns, URLs, or a list; an image's class is then its
            folder. Or TFRecord files.
        size: height and width, or one number for both; None means the size of the images, which
            must then all be equal.
        resize: treatment of images with another aspect ratio: "stretch" changes it, "crop" uses the
            middle of the image, "fit" uses the whole image and leaves a black margin. The filter is
            a triangle, antialiased when shrinking: Pillow's BILINEAR.
        channels: 3 for RGB, 1 for gray.
        classes: names of the folders in the order of the classes' numbers; None sorts them. Give
            the same to training and validation data, or `schema=train.schema`; a Trainer does this
            by itself. For records, names of the labels 0, 1, ...; None means the names that
            `flatout data convert` has written with the shards, or else the numbers.
        labels: whether there are classes; False reads images from any folders.
        reduced: decode large JPEGs at a half, quarter or eighth of their size where that still
            covers `size`. This is faster and changes pixel values.
        records: whether the files are TFRecord shards; None means that files whose names end in
            .tfrecord, .tfrecords or .tfrec are.
        on_error: "fail", or "skip" images that cannot be read.
        max_errors: maximum number of images to skip; for records, once when they are opened and
            once later.
        schema: a Schema, the path of one in TOML, or a dict, in place of all arguments above except
            `paths`, `records`, `on_error` and `max_errors`. Its options are `resize`, `reduced` and
            `classes`; without `resize`, images must have the size of the column.

    Returns:
        a Pipeline of `image` and `label` (int64).

    Raises:
        DataError: there are no images, or no class folders; images differ in size; a file is
            empty, missing, damaged or no image; a shard has changed; a label is not the number of a
            class; an argument makes no sense. The error names the file, and the byte in a shard.
    """
    if not HAVE_PILLOW:
        raise DataError("reading images takes Pillow", do="pip install 'flatout[images]'")
    given: dict[str, Any] = {
        "size": size,
        "resize": resize,
        "channels": channels,
        "classes": classes,
        "labels": labels,
        "reduced": reduced,
    }
    if schema is None:
        wanted = _of_arguments(**given)
    else:
        read = as_schema(schema, "images")
        defaults = images.__kwdefaults__ or {}
        beside = [name for name, value in given.items() if value != defaults[name]]
        if beside:
            raise DataError(f"{', '.join(beside)}: the schema says that already; found both")
        wanted = _of_schema(read)
    policy = ErrorPolicy(on_error, max_errors)
    labeled = wanted.label is not None
    stored: Images
    if _are_records(paths) if records is None else records:
        # Rows skipped while the index was built are counted and reported with the index.
        of_index = ErrorPolicy(on_error, max_errors)
        stored = ImageRecords(paths, labeled, wanted.classes, of_index)
    else:
        files = find_images(paths)
        if labeled and wanted.classes is None:
            check_no_splits(files, paths, takes_classes=True)
        stored = ImageFolders(files, labeled, wanted.classes, policy)
    return Pipeline(ImageRows(stored, wanted, policy))


def _are_records(paths: Paths) -> bool:
    given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    kinds = {os.fspath(path).lower().endswith(_RECORDS) for path in given}
    if len(kinds) > 1:
        raise DataError(
            "expected TFRecord files or image files, found both",
            do="read one and the other, and join them with flatout.data.mix",
        )
    return kinds == {True}


def _of_arguments(
    size: Any, resize: Any, channels: Any, classes: Any, labels: bool, reduced: bool
) -> ImageOptions:
    if channels not in (1, 3):
        raise DataError(f"channels: expected 3 or 1, found {channels!r}")
    if reduced and size is None:
        raise DataError("reduced wants a size to reduce images to")
    return ImageOptions(
        channels,
        None if size is None else _size(size),
        None if size is None else _resize(resize),
        bool(reduced),
        None if classes is None or not labels else _names(classes),
        "input",
        "target" if labels else None,
    )


def _of_schema(schema: Schema) -> ImageOptions:
    columns = {column.name: column for column in schema.columns}
    image, label = columns.pop("image", None), columns.pop("label", None)
    if image is None or columns:
        names = ", ".join(column.name for column in schema.columns)
        raise DataError(f"the columns of images are image, and label or not; found {names}")
    if image.dtype != "uint8" or len(image.shape) != 3 or image.shape[0] not in (1, 3):
        raise DataError(
            f"image: expected uint8 of 3 or 1 channels, height and width; found {image.words}"
        )
    if label is not None and (label.dtype != "int64" or label.shape or label.ragged):
        raise DataError(f"label: expected one int64 number, found {label.words}")
    options = dict(schema.options)
    resize, reduced = options.pop("resize", None), options.pop("reduced", False)
    classes = options.pop("classes", None)
    if options:
        raise DataError(
            f"the options of images are resize, reduced and classes; found {', '.join(options)}"
        )
    return ImageOptions(
        image.shape[0],
        (image.shape[1], image.shape[2]),
        None if resize is None else _resize(resize),
        bool(reduced),
        None if classes is None else _names(classes),
        image.role,
        None if label is None else label.role,
    )


def _size(size: Any) -> tuple[int, int]:
    pair = tuple(size) if isinstance(size, (tuple, list)) else (size, size)
    if len(pair) != 2 or not all(type(n) is int and 1 <= n <= 0xFFFF for n in pair):
        raise DataError(
            f"size: expected a number of pixels or (height, width), up to 65,535; found {size!r}"
        )
    return pair


def _resize(resize: Any) -> Resize:
    if resize not in get_args(Resize):
        raise DataError(f"resize: expected 'stretch', 'crop' or 'fit', found {resize!r}")
    mode: Resize = resize
    return mode


def _names(classes: Any) -> tuple[str, ...]:
    names = tuple(classes) if isinstance(classes, (tuple, list)) else ()
    if not names or not all(isinstance(name, str) for name in names):
        raise DataError(f"classes: expected a list of names, found {classes!r}")
    if len(set(names)) < len(names):
        raise DataError(f"classes: expected different names, found {', '.join(names)}")
    return names
