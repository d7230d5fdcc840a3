"""Photographs to make images of, for tests; and Exif data, byte by byte."""

from __future__ import annotations

import io
import math
import struct
from functools import cache

import numpy as np
import pytest
from sklearn.datasets import load_sample_images

Image = pytest.importorskip("PIL.Image")


@cache
def _photographs():
    return load_sample_images().images


def photo(height, width, number=0, enlarged=1.0):
    """A piece of a photograph as an array; two photographs of 427x640 are there."""
    whole = Image.fromarray(_photographs()[number % 2])
    whole = whole.resize(
        (round(whole.width * enlarged), round(whole.height * enlarged)), Image.Resampling.LANCZOS
    )
    left = (37 * number) % (whole.width - width + 1)
    top = (23 * number) % (whole.height - height + 1)
    return np.asarray(whole.crop((left, top, left + width, top + height)))


def encoded(array_or_image, form="JPEG", **options):
    image = array_or_image
    if isinstance(image, np.ndarray):
        image = Image.fromarray(image)
    if form == "JPEG":
        options = {"quality": 90, **options}
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def exif(orientation, order="<", kind=3, before=0):
    """Exif data as cameras write them, by hand: both byte orders, and entries before this one."""
    entries = [struct.pack(order + "HHII", 0x010E + n, 4, 1, n) for n in range(before)]
    value = struct.pack(order + ("HH" if kind == 3 else "I"), *([orientation, 0][: 5 - kind]))
    entries.append(struct.pack(order + "HHI", 0x0112, kind, 1) + value)
    start = b"II*\0" if order == "<" else b"MM\0*"
    directory = struct.pack(order + "H", len(entries)) + b"".join(entries) + bytes(4)
    return b"Exif\0\0" + start + struct.pack(order + "I", 8) + directory


def psnr(a, b):
    """Peak signal-to-noise ratio of two images in dB; infinite where they are equal."""
    error = np.mean(np.square(a.astype(np.float32) - b.astype(np.float32)))
    return 10 * math.log10(255**2 / error) if error else math.inf
