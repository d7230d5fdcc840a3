"""`flatout forecast`: what more hosts, devices or money would give."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

import typer
from typer import Argument

from flatout.cli.common import AsJson, Texts, console, option, print_json, with_options
from flatout.errors import FlatoutError

_HOSTS = "1, or 1..16 for 1, 2, 4, 8 and 16, or 1,2,3."


@dataclass(frozen=True)
class Options:
    """Options of `flatout forecast`."""

    hosts: str = option("1", f"How many hosts: {_HOSTS}", metavar="N")
    devices_per_host: int | None = option(
        None, "Ranks on each host; as in the run.", metavar="K", min=1
    )
    network: str | None = option(
        None,
        "Line rate of a host, such as 10Gb, or a file of what was measured.",
        metavar="RATE|FILE",
    )
    rtt: str | None = option(None, "Round trip between hosts, such as 0.2ms.", metavar="TIME")
    storage: str | None = option(
        None, "What all hosts together can read, such as 100MB per second.", metavar="RATE"
    )
    epochs: int | None = option(None, "Of how many; as in the run.", metavar="N", min=1)
    price: str | None = option(
        None,
        "Of a host per hour, one for each kind of machine, in the order of the runs.",
        metavar="NAME=PRICE,...|FILE",
    )
    currency: str | None = option(None, "Of the prices.", metavar="USD")
    deadline: str | None = option(None, "Find the cheapest within it.", metavar="TIME")
    budget: float | None = option(None, "Find the fastest for it.", metavar="MONEY")
    efficiency: float = option(
        0.7, "What a further host must give, of what the first does.", min=0.0, max=1.0
    )
    keep_rank_batch: bool = option(False, "Each rank keeps its batch; that changes learning.")
    settings: Texts = option(
        None, "Another strategy, reduction or compression.", "--set", metavar="world.KEY=VALUE"
    )
    measure: str | None = option(
        None,
        "Measure the network instead, for two minutes: between these hosts, over ssh "
        "(host1,host2, or a file with one in each line), or between ranks of this one. With "
        "a RUN at the sizes that it adds up.",
        metavar="HOSTS|here",
    )
    measure_time: str = option("2min", "How long --measure takes, about.", metavar="TIME")
    out: str = option("network.json", "What --measure writes.", metavar="FILE")
    options: Texts = option(
        None,
        "For --measure, as of flatout submit ssh: bin, config, folder, rendezvous.",
        "--option",
        metavar="NAME=VALUE",
    )


@with_options
def forecast(
    runs: Annotated[
        Texts, Argument(metavar="RUN...", help="Run folders of one job; other machines too.")
    ] = None,
    *,
    options: Options,
    as_json: AsJson = False,
) -> None:
    """Say what more hosts would give a job, with intervals, from what its runs measured."""
    from flatout.forecast import (
        Forecast,
        ForecastOptions,
        Prices,
        Shown,
        parse_network,
        parse_rate,
        parse_seconds,
        parse_settings,
    )

    if options.measure is not None:
        _measure(
            options.measure,
            runs or [],
            parse_seconds(options.measure_time),
            options.devices_per_host,
            options.out,
            options.options,
        )
        return
    if not runs:
        raise typer.BadParameter("name the folder of a run, or hosts with --measure")
    asked = ForecastOptions(
        hosts=_counts(options.hosts),
        per_host=options.devices_per_host,
        network=None if options.network is None else parse_network(options.network),
        rtt=None if options.rtt is None else parse_seconds(options.rtt),
        epochs=options.epochs,
        prices=None if options.price is None else Prices.parse(options.price, options.currency),
        deadline=None if options.deadline is None else parse_seconds(options.deadline),
        budget=options.budget,
        efficiency=options.efficiency,
        keeps_rank_batch=options.keep_rank_batch,
        storage=None if options.storage is None else parse_rate(options.storage),
        settings=parse_settings(options.settings or []),
    )
    shown = Shown(Forecast.of(runs, asked))
    if as_json:
        print_json(shown.as_dict())
        return
    console().print(shown)


def _measure(
    hosts: str,
    runs: list[str],
    seconds: float,
    devices_per_host: int | None,
    out: str,
    options: Texts,
) -> None:
    from flatout.console import say
    from flatout.forecast import measure_here, measure_hosts, sizes_of, words_of
    from flatout.measure import Profile

    profile = Profile.read(runs[-1]) if runs else None
    sizes, ranks = sizes_of(profile), devices_per_host
    if hosts == "here":
        result = measure_here(sizes, say, seconds, ranks or 0)
    else:
        if ranks is None:
            ranks = 1 if profile is None else profile.world["ranks_per_node"]
        result = measure_hosts(
            hosts, sizes, say, seconds=seconds, ranks_per_host=ranks, options=tuple(options or ())
        )
    try:
        result.write(out)
    except OSError as error:
        raise FlatoutError(f"cannot write: {error.strerror}", where=out) from error
    for line in words_of(result):
        typer.echo(line)
    typer.echo(f"wrote {out} · flatout forecast RUN --hosts 1..16 --network {out}")


def _counts(text: str) -> tuple[int, ...]:
    span = re.fullmatch(r"(\d+)\.\.(\d+)", text)
    if span is not None and 0 < int(span[1]) <= int(span[2]):
        low, high = int(span[1]), int(span[2])
        counts = {low, high, *(2**n for n in range(high.bit_length()) if low <= 2**n <= high)}
    elif re.fullmatch(r"\d+(,\d+)*", text) and all(map(int, text.split(","))):
        counts = set(map(int, text.split(",")))
    else:
        raise FlatoutError(f"expected numbers of hosts, found {text!r}", do=f"such as {_HOSTS}")
    return tuple(sorted(counts))
