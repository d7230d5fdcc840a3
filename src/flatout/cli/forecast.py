"""`flatout forecast`: what more hosts, devices or money would give."""

from __future__ import annotations

import re
from typing import Annotated

import typer
from typer import Argument, Option

from flatout.cli.common import AsJson, Texts, console, print_json
from flatout.errors import FlatoutError

_HOSTS = "1, or 1..16 for 1, 2, 4, 8 and 16, or 1,2,3."


def forecast(
    runs: Annotated[
        Texts, Argument(metavar="RUN...", help="Run folders of one job; other machines too.")
    ] = None,
    hosts: Annotated[str, Option(metavar="N", help=f"How many hosts: {_HOSTS}")] = "1",
    devices_per_host: Annotated[
        int | None, Option(metavar="K", min=1, help="Ranks on each host; as in the run.")
    ] = None,
    network: Annotated[
        str | None,
        Option(
            metavar="RATE|FILE",
            help="Line rate of a host, such as 10Gb, or a file of what was measured.",
        ),
    ] = None,
    rtt: Annotated[
        str | None, Option(metavar="TIME", help="Round trip between hosts, such as 0.2ms.")
    ] = None,
    storage: Annotated[
        str | None,
        Option(metavar="RATE", help="What all hosts together can read, such as 100MB per second."),
    ] = None,
    epochs: Annotated[
        int | None, Option(metavar="N", min=1, help="Of how many; as in the run.")
    ] = None,
    price: Annotated[
        str | None,
        Option(
            metavar="NAME=PRICE,...|FILE",
            help="Of a host per hour, one for each kind of machine, in the order of the runs.",
        ),
    ] = None,
    currency: Annotated[str | None, Option(metavar="USD", help="Of the prices.")] = None,
    deadline: Annotated[
        str | None, Option(metavar="TIME", help="Find the cheapest within it.")
    ] = None,
    budget: Annotated[
        float | None, Option(metavar="MONEY", help="Find the fastest for it.")
    ] = None,
    efficiency: Annotated[
        float,
        Option(min=0.0, max=1.0, help="What a further host must give, of what the first does."),
    ] = 0.7,
    keep_rank_batch: Annotated[
        bool, Option("--keep-rank-batch", help="Each rank keeps its batch; that changes learning.")
    ] = False,
    settings: Annotated[
        Texts,
        Option(
            "--set", metavar="world.KEY=VALUE", help="Another strategy, reduction or compression."
        ),
    ] = None,
    measure: Annotated[
        str | None,
        Option(
            metavar="HOSTS|here",
            help="Measure the network instead, for two minutes: between these hosts, over ssh "
            "(host1,host2, or a file with one in each line), or between ranks of this one. With "
            "a RUN at the sizes that it adds up.",
        ),
    ] = None,
    measure_time: Annotated[
        str, Option(metavar="TIME", help="How long --measure takes, about.")
    ] = "2min",
    out: Annotated[str, Option(metavar="FILE", help="What --measure writes.")] = ("network.json"),
    options: Annotated[
        Texts,
        Option(
            "--option",
            metavar="NAME=VALUE",
            help="For --measure, as of flatout submit ssh: bin, config, folder, rendezvous.",
        ),
    ] = None,
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

    if measure is not None:
        _measure(measure, runs or [], parse_seconds(measure_time), devices_per_host, out, options)
        return
    if not runs:
        raise typer.BadParameter("name the folder of a run, or hosts with --measure")
    asked = ForecastOptions(
        hosts=_counts(hosts),
        per_host=devices_per_host,
        network=None if network is None else parse_network(network),
        rtt=None if rtt is None else parse_seconds(rtt),
        epochs=epochs,
        prices=None if price is None else Prices.parse(price, currency),
        deadline=None if deadline is None else parse_seconds(deadline),
        budget=budget,
        efficiency=efficiency,
        keeps_rank_batch=keep_rank_batch,
        storage=None if storage is None else parse_rate(storage),
        settings=parse_settings(settings or []),
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
