"""Facts about a folder of images, without decoding all images."""

from __future__ import annotations

import numpy as np

from flatout.data.pipeline import Pipeline
from flatout.data.reading.error_policy import ErrorPolicy, OnError
from flatout.data.reading.files import Paths
from flatout.data.sources.images.image_bytes import ImageBytes

# Height and width to which images of several sizes are resized, if the user names none.
USUAL_SIZE = 224


def open_images_of_any_size(paths: Paths, on_error: OnError, max_errors: int) -> Pipeline:
    """Return decoded images, with labels if there are class folders, resized if sizes differ."""
    return open_found(
        ImageBytes(paths, ErrorPolicy(on_error, max_errors)), paths, on_error, max_errors
    )


def open_found(images: ImageBytes, paths: Paths, on_error: OnError, max_errors: int) -> Pipeline:
    import flatout.data

    return flatout.data.images(
        paths,
        size=USUAL_SIZE if len(sizes_of(images)) > 1 else None,
        labels=bool(images.classes),
        on_error=on_error,
        max_errors=max_errors,
    )


def sizes_of(images: ImageBytes) -> dict[tuple[int, int], int]:
    """Return the number of images of each height and width, the most frequent size first."""
    pairs = np.stack([images.headers["height"], images.headers["width"]], axis=1)
    sizes, counts = np.unique(pairs, axis=0, return_counts=True)
    turn = np.argsort(-counts, kind="stable")
    return {(int(h), int(w)): int(n) for (h, w), n in zip(sizes[turn], counts[turn], strict=True)}


def size_note(images: ImageBytes) -> str:
    sizes = sizes_of(images)
    (height, width), count = next(iter(sizes.items()))
    if len(sizes) == 1:
        return f"all images are {height}x{width}"
    small, *_, large = sorted(sizes, key=lambda size: size[0] * size[1])
    return (
        f"{len(sizes):,} sizes of images, {small[0]}x{small[1]} to {large[0]}x{large[1]}, most "
        f"often {height}x{width} ({count:,}); the schema resizes them to "
        f"{USUAL_SIZE}x{USUAL_SIZE}, edit it or pass size="
    )
