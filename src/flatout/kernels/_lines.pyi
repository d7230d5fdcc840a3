# Every parameter of type object takes an object with the buffer protocol, or what is said there.
def index(
    text: object,
    start: int,
    stop: int,
    starts: object,
    ends: object,
    count: int,
    skip_blank: bool,
    comment: bytes,
    white: bytes,
    /,
) -> tuple[int, int]: ...
def count(text: object, stop: int, /) -> int: ...
def read(
    fd: int, starts: object, ends: object, out: object, places: object, /
) -> tuple[int, int] | None: ...

# columns: a sequence of tuples (byte offset in the row, bytes, buffer). index: a buffer, or None.
def split(source: object, index: object, columns: object, /) -> None: ...
def join(columns: object, rows: int, out: object, index: object, /) -> None: ...
