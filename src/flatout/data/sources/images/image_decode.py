"""Decoding and resizing of one image.

simplejpeg (libjpeg-turbo) decodes JPEG; Pillow decodes all other formats and JPEG's rarer kinds.
Resizing uses a triangle filter, which for shrinking is two pixels of the result wide (antialiased):
Pillow's BILINEAR. With AVX2, torch does it five times as fast, equal up to rounding; without AVX2,
Pillow does it. After a reduced decode, a kernel does the rest of the shrinking.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from flatout.data.sources.images.image_header import FORMATS, Damaged, Header, check_png, damage_of
from flatout.kernels import resize_linear

try:
    from PIL import Image
except ImportError:
    Image = None  # type: ignore[assignment]
try:
    import simplejpeg
except ImportError:
    simplejpeg = None

Resize = Literal["stretch", "crop", "fit"]
Pixels: TypeAlias = npt.NDArray[np.uint8]

HAVE_PILLOW = Image is not None

# Only powers of two save time: libjpeg-turbo has no vector code for the other eighths, which are as
# slow as the whole image.
_REDUCTIONS = (8, 4, 2)
# Starts of libjpeg's messages about wrong pixels. After its other messages (an odd version number,
# an unusual sampling), Pillow decodes the image.
_DAMAGE = ("Premature end of JPEG file", "Corrupt JPEG data")
_TORCH_IS_FAST = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
# An image at most this many times too large needs little antialiasing. Plain linear interpolation
# saves an eighth of the time and costs 1 to 2 dB.
_QUICK_SHRINK = 1.2
# Sizes of images for which the reduction is cached.
_KEPT = 1024


@dataclass(frozen=True)
class ImageForm:
    """Form of the images that the decoder returns.

    Attributes:
        size: height and width.
        resize: treatment of images with another aspect ratio, as for `flatout.data.images`.
        channels: 1 or 3.
        reduced: whether a JPEG is decoded at a half, quarter or eighth of its size if that is
            enough.
    """

    size: tuple[int, int]
    resize: Resize
    channels: int
    reduced: bool


def has_simplejpeg() -> bool:
    return simplejpeg is not None


def scratch_bytes(header: Header, look: ImageForm) -> int:
    """Return the bytes that `decode` needs for an image before it is resized."""
    return math.prod(_decoded(header, look)[1]) * look.channels


def decode(
    data: bytes | memoryview,
    header: Header,
    look: ImageForm,
    out: Pixels,
    scratch: Pixels,
    lost: set[str],
) -> None:
    times, shape = _decoded(header, look)
    if shape == look.size and header.orientation == 1:
        scratch = out
    stored = _stored(data, header, times, shape, look.channels, scratch, lost)
    if np.may_share_memory(stored, out):
        return
    window, inner = _frame(stored.shape[:2], _turned_size(header, look.size), look.resize)
    height, width = _turned_size(header, inner)
    if (height, width) != look.size:
        out[:] = 0
    top, left = (out.shape[0] - height) // 2, (out.shape[1] - width) // 2
    place = out[top : top + height, left : left + width]
    # Resized before it is rotated, because the result is smaller.
    if times == 1 or not _is_close(stored[window].shape, inner):
        place[:] = _turned(_resized(stored[window], inner), header.orientation)
    elif header.orientation == 1:
        resize_linear(stored[window], place)
    else:
        resized = np.empty((*inner, look.channels), np.uint8)
        resize_linear(stored[window], resized)
        place[:] = _turned(resized, header.orientation)


def _turned_size(header: Header, size: tuple[int, int]) -> tuple[int, int]:
    height, width = size
    return (width, height) if header.orientation >= 5 else (height, width)


def _decoded(header: Header, look: ImageForm) -> tuple[int, tuple[int, int]]:
    stored = _turned_size(header, (header.height, header.width))
    if not look.reduced:
        return 1, stored
    return _reduced(stored, _turned_size(header, look.size), look.resize)


@lru_cache(_KEPT)
def _reduced(
    stored: tuple[int, int], target: tuple[int, int], resize: Resize
) -> tuple[int, tuple[int, int]]:
    for times in _REDUCTIONS:
        smaller = -(-stored[0] // times), -(-stored[1] // times)
        window, inner = _frame(smaller, target, resize)
        rows, columns = (part.stop - part.start for part in window)
        if rows >= inner[0] and columns >= inner[1]:
            return times, smaller
    return 1, stored


def _frame(
    stored: tuple[int, ...], target: tuple[int, int], resize: Resize
) -> tuple[tuple[slice, slice], tuple[int, int]]:
    height, width = stored
    rows, columns = target
    is_taller = height * columns > width * rows
    if resize == "fit":
        if is_taller:
            columns = max(1, round(width * rows / height))
        else:
            rows = max(1, round(height * columns / width))
    top = left = 0
    if resize == "crop" and is_taller:
        used = max(1, round(width * rows / columns))
        top, height = (height - used) // 2, used
    elif resize == "crop":
        used = max(1, round(height * columns / rows))
        left, width = (width - used) // 2, used
    return (slice(top, top + height), slice(left, left + width)), (rows, columns)


def _stored(
    data: bytes | memoryview,
    header: Header,
    times: int,
    shape: tuple[int, int],
    channels: int,
    scratch: Pixels,
    lost: set[str],
) -> Pixels:
    if simplejpeg is None or not header.plain_jpeg:
        return _by_pillow(data, header, times, channels, lost)
    try:
        pixels: Pixels = simplejpeg.decode_jpeg(
            data,
            "RGB" if channels == 3 else "GRAY",
            min_height=shape[0],
            min_width=shape[1],
            min_factor=2,
            buffer=scratch,
            strict=True,
        )
    except ValueError as error:
        if str(error).startswith(_DAMAGE):
            raise Damaged(f"the JPEG is damaged: {error}") from error
        return _by_pillow(data, header, times, channels, lost)
    if pixels.shape[:2] != shape:
        raise _another(header)
    return pixels


def _by_pillow(
    data: bytes | memoryview, header: Header, times: int, channels: int, lost: set[str]
) -> Pixels:
    check_png(data)
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            height, width = _turned_size(header, (header.height, header.width))
            if image.size != (width, height):
                raise _another(header)
            # A JPEG stores its gray image apart from the colors: no need to compute it.
            smaller = (width // times, height // times) if times > 1 else None
            image.draft("L" if channels == 1 else None, smaller)
            lost.update(_lost_in(image))
            pixels = _eight_bits(image, channels)
    except (Damaged, MemoryError):
        raise
    except Exception as error:  # Pillow's readers raise errors of any type
        raise damage_of(error, data) from error
    if times == 1 and pixels.shape[:2] != (height, width):
        raise _another(header)
    return pixels


def _lost_in(image: Any) -> Iterator[str]:
    if image.mode.startswith("I") or ";16" in str(image.tile):
        yield "its values of 16 bits are cut to their upper 8 bits"
    if image.has_transparency_data:
        is_opaque = "A" in image.getbands() and image.getchannel("A").getextrema()[0] == 255
        if not is_opaque:
            yield "its transparency is dropped"


def _eight_bits(image: Any, channels: int) -> Pixels:
    if image.mode.startswith("I"):
        # Pillow clips values above 255, which would make a photograph of 16 bits white.
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 0xFFFF:
            raise Damaged("expected gray values of at most 16 bits, found more")
        image = Image.fromarray((values >> 8).astype(np.uint8))
    elif image.mode == "F":
        raise Damaged("expected whole numbers as pixels, found floating-point ones")
    pixels = np.asarray(image.convert("RGB" if channels == 3 else "L"))
    return pixels.reshape(*pixels.shape[:2], channels)


def _another(header: Header) -> Damaged:
    return Damaged(
        f"expected {header.height} x {header.width} pixels, as when it was opened; found others"
    )


def _is_close(size: tuple[int, ...], wanted: tuple[int, int]) -> bool:
    return size[0] <= _QUICK_SHRINK * wanted[0] and size[1] <= _QUICK_SHRINK * wanted[1]


def _resized(pixels: Pixels, size: tuple[int, int], by_torch: bool = _TORCH_IS_FAST) -> Pixels:
    if pixels.shape[:2] == size:
        return pixels
    if not by_torch:
        image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
        smaller = np.asarray(image.resize(size[::-1], Image.Resampling.BILINEAR))
        return smaller.reshape(*size, pixels.shape[2])
    # One image in channels_last memory is torch's fast path with AVX2, and uses this thread alone.
    # An array from Pillow is read-only, of which torch would warn.
    own = np.require(pixels, requirements=["C", "W"])
    batch = torch.from_numpy(own).unsqueeze(0).permute(0, 3, 1, 2)
    result = torch.nn.functional.interpolate(batch, size, mode="bilinear", antialias=True)
    return result[0].permute(1, 2, 0).numpy()


def _turned(pixels: Pixels, orientation: int) -> Pixels:
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    # After this transposition, rows and columns are reversed in these orientations.
    rows = -1 if orientation in (3, 4, 7, 8) else 1
    columns = -1 if orientation in (2, 3, 6, 7) else 1
    return pixels[::rows, ::columns]
