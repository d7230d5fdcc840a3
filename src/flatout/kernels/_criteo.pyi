# Parameters of type object take an object with the buffer protocol; labels also None.
# missing_integer is a float for float32 integers.
def parse(
    buffer: object,
    starts: object,
    ends: object,
    labels: object,
    integers: object,
    categories: object,
    status: object,
    at: object,
    has_label: bool,
    missing_integer: float,
    missing_category: int,
    buckets: int,
    is_plain: bool,
    /,
) -> int: ...
