"""JSON text that contains its own SHA-256 (the seal), so that any changed byte is detected.

The seal is the SHA-256 (hexadecimal) of the text in which the seal's own 64 characters are '0'.
"""

from __future__ import annotations

import hashlib

# Seal before the SHA-256 is known.
BLANK = "0" * 64


def seal(key: str, text: bytes) -> bytes:
    """Return `text` with its seal in place of the blank seal under `key`, in json.dumps style.

    Only the first `"key": "000..."` is replaced, so it must come before any text of a user.
    """
    digest = hashlib.sha256(text).hexdigest()
    return text.replace(_field(key, BLANK), _field(key, digest), 1)


def is_intact(key: str, text: bytes, digest: object) -> bool:
    if not isinstance(digest, str) or _field(key, digest) not in text:
        return False
    blank = text.replace(_field(key, digest), _field(key, BLANK), 1)
    return hashlib.sha256(blank).hexdigest() == digest


def _field(key: str, value: str) -> bytes:
    return f'"{key}": "{value}"'.encode()
