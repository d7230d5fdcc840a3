# image, small, codes and parallel are addresses.
def run(
    backward: bool,
    image: int,
    small: int,
    codes: int,
    images: int,
    height: int,
    width: int,
    channels: int,
    item: int,
    parallel: int,
    threads: int,
    /,
) -> None: ...
