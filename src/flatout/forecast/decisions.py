"""Recommendations from a forecast, each with the number that decided it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flatout.forecast.forecast import COVERED, WIDENED, Forecast, Point, Side, Spreading
from flatout.forecast.job import Floats, Job
from flatout.forecast.profiled import BUSY, input_wait, use_of
from flatout.forecast.step import MachineDraws, step_terms
from flatout.words import counted, duration, rounded

# Share of a step from which waiting for input counts as the limit of a job.
_WAITS = 0.1
# Smallest ratio of rates from which a change of settings is reported.
_GAIN = 1.05
# Share of the rate's variance that an unknown value must explain to be worth measuring.
_TELLS = 0.15
_BINS = 10
# By kind of unknown value: attributes of `MachineDraws`, and the measurement that determines them.
_MEASUREMENTS = {
    "network": (
        ("nic", "rtt", "summing"),
        "measure the network: `flatout forecast --measure hosts.txt`",
    ),
    "batch": (("fixed",), "time steps at three or four local batch sizes"),
    "host": (("contention", "power", "inside"), "run with other numbers of ranks on one host"),
    "overlap": (("hidden",), "run with two ranks, to see what backward hides"),
    "stragglers": (("spread",), "run for longer, with several ranks"),
    "machine": (("seconds",), "run for longer"),
}


@dataclass(frozen=True)
class Decision:
    """A recommendation for the user.

    Attributes:
        about: "path", "hosts", "deadline", "budget", "held back", "settings", "servers", "narrow",
            "device" or "money".
        choice: the recommended value, such as a number of hosts, for use by programs; None without
            one.
        words: the recommendation in words, with the number that decided it.
        number: the number that decided, as in `words`.
    """

    about: str
    choice: str | int | None
    words: str
    number: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def decisions(forecast: Forecast) -> list[Decision]:
    decisions: list[Decision] = []
    for place, side in enumerate(forecast.sides, 1):
        of_side = [_path(side), *_hosts(side), *_held_back(side), *_servers(side), *_narrow(side)]
        if len(forecast.sides) > 1:
            name = _name(side, place)
            of_side = [replace(item, words=f"{name}: {item.words}") for item in of_side]
        decisions += of_side
    return [*decisions, *_device(forecast)]


def _path(side: Side) -> Decision:
    run = side.measured.first
    waits = input_wait(run)
    busy, what = use_of(run)
    if waits >= _WAITS:
        words = f"stay where you are: input waits {waits:.0%} of a step -> `flatout doctor` first"
        return Decision("path", "stay", words, waits)
    if busy is not None and busy < BUSY:
        words = (
            f"stay where you are: its {_are(what)} {busy:.0%} busy, more pay from {BUSY:.0%} on "
            "-> `flatout doctor` first"
        )
        return Decision("path", "stay", words, busy)
    there = len(run.ranks[0].machine.get("gpus") or [])
    if side.measured.device == "cuda" and side.measured.per_host < there:
        words = f"more devices in the host first: {side.measured.per_host} of {there} GPUs are used"
        return Decision("path", "devices", words, side.measured.per_host / there)
    if max(side.asked.hosts) == 1:
        words = "the host is in full use: more come from more hosts (--hosts 1..4 --network 10Gb)"
        return Decision("path", "hosts", words, busy)
    last = _last_efficient(side)
    if last.hosts == 1:
        words = f"stay on one host: another gives {_next_marginal(side):.0%} of it"
        return Decision("path", "stay", words, _next_marginal(side))
    known = "" if busy is None else f"its {_are(what)} {busy:.0%} busy, "
    words = f"more hosts: {known}the last of {last.hosts} gives {last.marginal:.0%} of the first"
    return Decision("path", "hosts", words, last.marginal)


def _hosts(side: Side) -> Iterator[Decision]:
    if len(side.points) < 2:
        return
    asked, last = side.asked, _last_efficient(side)
    yield Decision(
        "hosts",
        last.hosts,
        f"{last.hosts}: the last whose further hosts give {asked.efficiency:.0%} of the first or "
        f"more ({last.marginal:.0%})",
        last.marginal,
    )
    if asked.deadline is not None:
        yield _cheapest(side, asked.deadline)
    if asked.budget is not None:
        yield _fastest(side, asked.budget)


def _numbers(side: Side) -> list[Point]:
    return [point for point in side.points if not point.is_range] or side.points[:1]


def _last_efficient(side: Side) -> Point:
    result = _numbers(side)[0]
    for point in _numbers(side)[1:]:
        if point.marginal < side.asked.efficiency:
            break
        result = point
    return result


def _next_marginal(side: Side) -> float:
    beyond = [point for point in _numbers(side) if point.hosts > 1]
    return beyond[0].marginal if beyond else 0.0


def _cheapest(side: Side, deadline: float) -> Decision:
    limit = duration(deadline)
    timely = [
        point
        for point in _numbers(side)
        if point.seconds is not None and point.seconds.middle <= deadline
    ]
    if not timely:
        return Decision("deadline", None, f"none of these sizes is known to end within {limit}")
    if side.price is None:
        best = min(timely, key=lambda point: point.hosts)
    else:
        best = min(timely, key=lambda point: point.cost.middle if point.cost else 0.0)
    assert best.seconds is not None
    surely = "" if best.seconds.high <= deadline else f", at worst {duration(best.seconds.high)}"
    what = "fewest" if side.price is None else "cheapest"
    words = f"{best.hosts}: the {what} within {limit} ({duration(best.seconds.middle)}{surely})"
    return Decision("deadline", best.hosts, words, best.seconds.middle)


def _fastest(side: Side, budget: float) -> Decision:
    currency = side.asked.prices.currency if side.asked.prices is not None else ""
    limit = f"{rounded(budget)} {currency}"
    paid = [
        point for point in _numbers(side) if point.cost is not None and point.cost.middle <= budget
    ]
    if not paid:
        return Decision("budget", None, f"none of these sizes is known to cost {limit} or less")
    best = max(paid, key=lambda point: point.rate.middle)
    assert best.cost is not None
    most = "" if best.cost.high <= budget else f", at worst {rounded(best.cost.high)}"
    words = f"{best.hosts}: the fastest for {limit} ({rounded(best.cost.middle)}{most})"
    return Decision("budget", best.hosts, words, best.cost.middle)


def _held_back(side: Side) -> Iterator[Decision]:
    point = side.points[-1]
    first, whole = side.points[0].terms, sum(point.terms.values())
    name = max(
        (term for term in point.terms if term != "compute"),
        key=lambda term: point.terms[term] - first[term],
    )
    lost = point.terms[name] / whole
    if point.hosts > 1 and lost >= 0.05:
        words = (
            f"from {_from(side, name)} hosts on by {name} ({lost:.0%} of a step at {point.hosts})"
        )
        yield Decision("held back", name, words, lost)
    yield from _settings(side, point)


def _from(side: Side, name: str) -> int:
    for point in side.points:
        if point.hosts > 1 and point.terms[name] >= 0.05 * sum(point.terms.values()):
            return point.hosts
    return side.points[-1].hosts


def _settings(side: Side, point: Point) -> Iterator[Decision]:
    job = side.measured.job
    if point.hosts == 1 or job.strategy != "ddp":
        return
    tried: dict[str, Job] = {}
    if job.compression == "off":
        tried["compression=bf16"] = replace(job, compression="bf16")
    if point.shape.per_host > 1 and job.reduction not in ("hierarchical", "nccl"):
        tried["reduction=hierarchical"] = replace(job, reduction="hierarchical")
    now = side.rates(point.shape)
    gains = {
        name: float(np.median(side.rates(point.shape, other) / now))
        for name, other in tried.items()
    }
    best = max(gains, key=lambda name: gains[name], default="")
    if best and gains[best] >= _GAIN:
        words = f"--set world.{best} would give {gains[best]:.2f}x at {point.hosts} hosts"
        yield Decision("settings", best, words, gains[best])


def _servers(side: Side) -> Iterator[Decision]:
    job, point = side.measured.job, _numbers(side)[-1]
    if point.hosts == 1 or job.strategy not in ("ddp", "parameter_server"):
        return
    summed = replace(job, strategy="ddp")
    served, where = job, f"{counted(job.servers, 'more host')} with a server each"
    if job.served not in ("towers", "apart"):
        size = point.shape.ranks
        served = replace(job, strategy="parameter_server", servers=size, served="reduced")
        where = "each rank a server"
    ratio = Spreading.of(side.rates(point.shape, served) / side.rates(point.shape, summed), COVERED)
    words = f"{ratio.middle:.2f}x [{ratio.low:.2f},{ratio.high:.2f}] of an all-reduce's speed"
    words += f" at {point.hosts} hosts, {where}"
    choice = "servers" if ratio.low > 1 else "all_reduce"
    taken = "parameter servers" if choice == "servers" else "all-reduce"
    yield Decision("servers", choice, f"{taken}: servers have {words}", ratio.middle)


def _narrow(side: Side) -> Iterator[Decision]:
    point = side.points[-1]
    if point.rate.high / point.rate.low < 1.1:
        return
    # The error of the model is left out, since no measurement of the machine reduces this error.
    seconds = sum(step_terms(side.measured.job, point.shape, side.draws).values())
    known = _shares(side.draws, point.shape.samples / np.asarray(seconds))
    if side.measured.has_crossed or point.hosts == 1 or not isinstance(side.asked.network, float):
        known.pop("network")
    # A value that was measured and is still uncertain is noise.
    if any(run.step_times for run in side.measured.profiles):
        known.pop("batch")
    if any(run.ranks_on_host for run in side.measured.profiles):
        known.pop("host")
    best = max(known, key=lambda name: known[name])
    if known[best] >= _TELLS:
        words = f"{_MEASUREMENTS[best][1]} ({known[best]:.0%} of the removable variance)"
        yield Decision("narrow", best, words, known[best])


def _shares(draws: MachineDraws, rates: Floats) -> dict[str, float]:
    """Return the share of the variance of log(rate) that each kind of unknown explains alone.

    First-order Sobol indices by binning each draw (Saltelli et al., "Global Sensitivity Analysis",
    2008); the largest index of the unknowns that one measurement determines.
    """
    log = np.log(rates)
    whole = float(log.var())
    if whole < 1e-12:
        return dict.fromkeys(_MEASUREMENTS, 0.0)
    return {
        name: max(_explained(getattr(draws, unknown), log) for unknown in unknowns) / whole
        for name, (unknowns, _) in _MEASUREMENTS.items()
    }


def _explained(unknown: Floats, log: Floats) -> float:
    if not np.isfinite(unknown).all() or np.ptp(unknown) == 0:  # no limit, or known exactly
        return 0.0
    bins = np.array_split(log[np.argsort(unknown, kind="stable")], _BINS)
    # The means of bins without any effect still vary by chance.
    chance = float(np.mean([bin.var() / len(bin) for bin in bins]))
    return max(0.0, float(np.var([bin.mean() for bin in bins])) - chance)


def _device(forecast: Forecast) -> Iterator[Decision]:
    if len(forecast.sides) < 2:
        return
    first, second = forecast.sides[:2]
    names = [_name(side, place) for place, side in enumerate((first, second), 1)]
    rates = [side.rates(side.shape(1)) for side in (first, second)]
    # Draws of two machines are independent.
    apart = np.random.default_rng(4).permutation(rates[1]) / rates[0]
    ratio = Spreading.of(apart, COVERED).widened(WIDENED["measured"])
    fast = 1 if ratio.middle > 1 else 0
    factor = ratio.middle if fast else 1 / ratio.middle
    ends = (ratio.low, ratio.high) if fast else (1 / ratio.high, 1 / ratio.low)
    words = (
        f"{names[fast]}: {factor:.2f}x [{ends[0]:.2f},{ends[1]:.2f}] as fast as {names[1 - fast]}"
    )
    yield Decision("device", names[fast], words, factor)
    if first.price is None or second.price is None:
        return
    costs = [
        side.price[1] / 3600 / float(np.median(rate)) * 1e6
        for side, rate in zip((first, second), rates, strict=True)
        if side.price is not None
    ]
    cheap = 0 if costs[0] <= costs[1] else 1
    currency = forecast.asked.prices.currency if forecast.asked.prices is not None else ""
    words = (
        f"{names[cheap]} is the cheaper: {rounded(costs[cheap])} {currency} per million samples, "
        f"{names[1 - cheap]} {rounded(costs[1 - cheap])}"
    )
    yield Decision("money", names[cheap], words, costs[cheap])


def _are(what: str) -> str:
    return f"{what} {'is' if what == 'GPU' else 'are'}"


def _name(side: Side, place: int) -> str:
    if side.price is not None:
        return side.price[0]
    return {"cpu": "the CPU", "cuda": "the GPU"}.get(side.measured.device, f"run {place}")
