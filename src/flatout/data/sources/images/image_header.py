"""Facts in the first bytes of an image file: format, size and orientation.

For JPEG, from its segments (ITU-T T.81, annex B) and Exif orientation (CIPA DC-008, section 4.6.4);
for all other formats from Pillow, without decoding pixels.
"""

from __future__ import annotations

import io
import os
import stat
import struct
import zlib
from collections.abc import Callable
from typing import IO, NamedTuple

try:
    from PIL import Image
except ImportError:
    Image = None  # type: ignore[assignment]

# First bytes of a PNG file.
_PNG = b"\x89PNG\r\n\x1a\n"
# Formats that Pillow may read. Some of its other formats run programs.
FORMATS = ("PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF", "PPM", "JPEG2000")
# Bytes that hold most headers; the rest of a file is read only if its header is longer.
_HEAD = 4096
# Maximum number of bytes of an image file.
_MOST_BYTES = 1 << 30
# Maximum number of segments of a JPEG before its size.
_MOST_SEGMENTS = 4096
# Twice Pillow's limit for a warning, which is Pillow's limit for an error.
_MOST_PIXELS = 178_956_970
# JPEG's markers of segments with the image's size.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
# JPEG's markers that no length follows.
_WITHOUT_LENGTH = frozenset({0x01, *range(0xD0, 0xD8)})
# Other markers of JPEG; _APP1 holds Exif data, and _FILL is padding.
_START_OF_SCAN, _END, _APP1, _FILL = 0xDA, 0xD9, 0xE1, 0xFF
# Exif's tag of the orientation.
_ORIENTATION = 0x0112
# Exif's types of 16-bit and 32-bit numbers.
_SHORT, _LONG = 3, 4


class Damaged(Exception):
    """An image that cannot be read, and why. The caller adds its name."""


class Header(NamedTuple):
    """Facts about an image that need no decoding.

    Attributes:
        height: height of the upright image, in pixels.
        width: width of the upright image, in pixels.
        orientation: Exif's number, 1 to 8, of the turn that makes the stored pixels upright.
        plain_jpeg: whether it is a JPEG of one component (gray) or three.
        bytes: size of the file.
        check: CRC-32 of the first bytes.
    """

    height: int
    width: int
    orientation: int
    plain_jpeg: bool
    bytes: int
    check: int


def read_header(path: str) -> Header:
    try:
        # Without O_NONBLOCK, opening a named pipe would wait for its writer.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise Damaged(f"cannot be opened: {error.strerror}") from error
    try:
        return _read(handle, path)
    except OSError as error:
        raise Damaged(f"cannot be read: {error.strerror}") from error
    finally:
        os.close(handle)


def header_of(data: bytes | memoryview) -> Header:
    def read(start: int, count: int) -> bytes:
        return bytes(data[start : start + count])

    _check_size(len(data))
    return _header(read(0, _HEAD), read, len(data), lambda: io.BytesIO(data))


def is_of(header: Header, data: bytes) -> bool:
    """Return whether image bytes begin like those from which a header was read."""
    return zlib.crc32(data[:_HEAD]) == header.check


def _read(handle: int, path: str) -> Header:
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        raise Damaged("expected a file, found something else by that name")
    _check_size(status.st_size)
    head = os.pread(handle, _HEAD, 0)

    def read(start: int, count: int) -> bytes:
        inside = start + count <= len(head)
        return head[start : start + count] if inside else os.pread(handle, count, start)

    return _header(head, read, status.st_size, lambda: path)


def _check_size(size: int) -> None:
    if size == 0:
        raise Damaged("it is empty: 0 bytes")
    if size > _MOST_BYTES:
        raise Damaged(f"expected an image of at most {_MOST_BYTES:,} bytes, found {size:,}")


def _header(
    head: bytes,
    read: Callable[[int, int], bytes],
    size: int,
    whole: Callable[[], str | IO[bytes]],
) -> Header:
    plain_jpeg = False
    if head.startswith(b"\xff\xd8"):
        height, width, components, orientation = _jpeg(read)
        plain_jpeg = components in (1, 3)
    else:
        height, width, orientation = _other(whole(), head)
    if height < 1 or width < 1 or height * width > _MOST_PIXELS:
        raise Damaged(
            f"expected 1 to {_MOST_PIXELS:,} pixels, found {height:,} x {width:,} in the header"
        )
    if orientation >= 5:
        height, width = width, height
    return Header(height, width, orientation, plain_jpeg, size, zlib.crc32(head))


def _jpeg(read: Callable[[int, int], bytes]) -> tuple[int, int, int, int]:
    at, orientation = 2, 1
    for _ in range(_MOST_SEGMENTS):
        begin = read(at, 4)
        if len(begin) < 4 or begin[0] != 0xFF:
            raise Damaged(
                f"the JPEG is damaged: expected a segment at byte {at:,}, "
                f"found {begin.hex(' ') or 'the end of the file'}"
            )
        marker, length = begin[1], int.from_bytes(begin[2:])
        if marker == _FILL:
            at += 1
        elif marker in _WITHOUT_LENGTH:
            at += 2
        elif marker in _FRAMES:
            frame = read(at + 4, 6)
            if len(frame) < 6:
                raise Damaged(f"the JPEG is truncated within its header, at byte {at:,}")
            _, height, width, components = struct.unpack(">BHHB", frame)
            return height, width, components, orientation
        elif marker in (_START_OF_SCAN, _END) or length < 2:
            raise Damaged(
                f"the JPEG is damaged: expected its size before byte {at:,}, found {begin.hex(' ')}"
            )
        else:
            if marker == _APP1 and orientation == 1 and read(at + 4, 6) == b"Exif\0\0":
                orientation = _exif_orientation(read(at + 10, length - 8))
            at += 2 + length
    raise Damaged(f"the JPEG is damaged: no size in its first {at:,} bytes")


def _exif_orientation(tiff: bytes) -> int:
    order = {b"II": "<", b"MM": ">"}.get(tiff[:2])
    if order is None:
        return 1
    try:
        (start,) = struct.unpack_from(order + "I", tiff, 4)
        (entries,) = struct.unpack_from(order + "H", tiff, start)
        for entry in range(start + 2, start + 2 + 12 * entries, 12):
            tag, kind = struct.unpack_from(order + "HH", tiff, entry)
            if tag == _ORIENTATION and kind in (_SHORT, _LONG):
                form = "H" if kind == _SHORT else "I"
                return _known_orientation(struct.unpack_from(order + form, tiff, entry + 8)[0])
    except struct.error:
        pass  # Exif data of cameras are sometimes cut short in a whole image
    return 1


def _known_orientation(value: object) -> int:
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _other(whole: str | IO[bytes], head: bytes) -> tuple[int, int, int]:
    try:
        with Image.open(whole, formats=FORMATS) as image:
            # Exif data after the pixels of a PNG are ignored. Pillow turns a TIFF itself.
            silent = image.format == "TIFF" or (image.format == "PNG" and "exif" not in image.info)
            turned = 1 if silent else image.getexif().get(_ORIENTATION, 1)
            return image.height, image.width, _known_orientation(turned)
    except MemoryError:
        raise
    except Exception as error:  # Pillow's readers raise errors of any type
        raise damage_of(error, head) from error


def check_png(data: bytes | memoryview) -> None:
    """Compare the checksums of a PNG's chunks. Pillow does not check those of pixels."""
    view, at = memoryview(data), len(_PNG)
    if view[:at] != _PNG:
        return
    while at + 12 <= len(view):
        size, kind = struct.unpack_from(">I4s", view, at)
        end = at + 8 + size
        if end + 4 > len(view):
            return  # the file is truncated, which the decoder reports
        (wanted,) = struct.unpack_from(">I", view, end)
        if zlib.crc32(view[at + 4 : end]) != wanted:
            raise Damaged(f"the PNG is damaged: chunk {kind!r} at byte {at:,} has a wrong CRC-32")
        if kind == b"IEND":
            return
        at = end + 4


def damage_of(error: Exception, data: bytes | memoryview) -> Damaged:
    """Translate an error of Pillow for the user."""
    if type(error).__name__ == "UnidentifiedImageError":
        begin = data[:8].hex(" ")
        return Damaged(f"no image, or damaged in its header: it begins with {begin}")
    return Damaged(f"damaged: {error}")
