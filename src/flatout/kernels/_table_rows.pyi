# All but count, size, width, base, now, horizon, epsilon, rule, nothing_decays, widest, threads,
# first of deal, ranks and shift are addresses. Of each table: weights, first, second, last, rows,
# gradients, count, width, epsilon, and the lower halves of the first three.
def step_rows(
    tables: list[tuple[int, int, int, int, int, int, int, int, float, int, int, int]],
    steps: int,
    missed: int,
    base: int,
    now: int,
    rule: int,
    nothing_decays: bool,
    widest: int,
    parallel: int,
    threads: int,
    /,
) -> None: ...
def pass_step(steps: int, missed: int, base: int, now: int, horizon: int, rule: int, /) -> None: ...
def group(ids: int, count: int, size: int, rows: int, places: int, starts: int, /) -> int: ...
def deal(
    rows: int,
    places: int,
    starts: int,
    count: int,
    first: int,
    ranks: int,
    shift: int,
    to_rows: int,
    to_places: int,
    to_starts: int,
    local: int,
    numbers: int,
    counts: int,
    /,
) -> None: ...
def sum_rows(
    values: int,
    places: int,
    starts: int,
    out: int,
    count: int,
    width: int,
    parallel: int,
    threads: int,
    /,
) -> None: ...
