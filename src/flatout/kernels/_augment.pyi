# All but the last take objects with the buffer protocol; from `parts` on None too.
def change(
    source: object,
    out: object,
    index: object,
    places: object,
    parts: object,
    factors: object,
    boxes: object,
    vectors: int,
    /,
) -> None: ...
