"""Speed, time and cost on more hosts, from the Profiles of runs.

    Forecast.of(["runs/today"], ForecastOptions(hosts=(1, 2, 4), network=parse_rate("10Gb")))

Each number has an interval. It covers the unknown values of the machine and the network, and is
widened by the errors of this model on published series (`bench/forecast_judge.py`). Beyond four
times the measured number of ranks, only a range is reported. The time to an accuracy is not
forecast, because the number of samples that an accuracy needs depends on the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from flatout.errors import FlatoutError
from flatout.forecast.calibrate import calibrate, total_seconds
from flatout.forecast.job import Floats, Job, Prior, Range, Shape, StepTime
from flatout.forecast.network import Network
from flatout.forecast.prices import Prices
from flatout.forecast.profiled import TCP, MeasuredRuns, read_runs, sent_alone
from flatout.forecast.step import MachineDraws, step_terms
from flatout.measure import Profile

COVERED = 0.9
"""Share of rates that lie within the intervals."""
FARTHEST = 4.0
"""Largest multiple of the measured number of ranks for which a number is reported."""
WIDENED = {"measured": 1.14, "given": 1.51}
"""Factors by which intervals are widened, for a link measured in steps and for a given link.

`bench/forecast_accuracy.py` computes them from the errors on published series.
"""
# Range of a link's rate on another day or between other hosts, as a share of the measured rate.
_MEASURED_BAND: Range = (0.8, 1.05)
# Range of seconds of a round trip between hosts of one data center, where the user gives no value.
_RTT: Range = (5e-5, 5e-4)
# Standard deviation of the logarithm of a run's rate between repeated runs on one machine.
_AGAIN = 0.015
# Smallest difference of logarithms of step times at which timed steps contradict the given network.
_CONTRADICTS = 0.05
# Range of bytes per second of a host's link, where the given network is ignored.
_ANY_NIC: Range = (1e6, 5e10)
_ANY_RTT: Range = (1e-6, 1e-2)


@dataclass(frozen=True)
class ForecastOptions:
    """Options of a forecast, as the user gave them.

    Attributes:
        hosts: numbers of hosts to forecast, each above 0.
        per_host: number of ranks on each host; None means as in the largest run.
        network: a measured network, or bytes per second of a host's link; None if unknown.
        rtt: seconds of a round trip between hosts; None if unknown.
        epochs: number of epochs for which hours and costs are computed; None means as in the run.
        prices: prices of hosts.
        deadline: seconds in which these epochs must end; None without a deadline.
        budget: maximum cost, in the currency of the prices; None without a budget.
        efficiency: smallest gain from one more host that is worthwhile, as a share of the first
            host's rate.
        keeps_rank_batch: True keeps the batch of each rank for any number of hosts; False keeps the
            batch of all ranks together.
        storage: bytes per second that all hosts together can read; None means no limit.
        settings: settings of `world`, by name, that replace the settings of the runs.
    """

    hosts: tuple[int, ...] = (1,)
    per_host: int | None = None
    network: Network | float | None = None
    rtt: float | None = None
    epochs: int | None = None
    prices: Prices | None = None
    deadline: float | None = None
    budget: float | None = None
    efficiency: float = 0.7
    keeps_rank_batch: bool = False
    storage: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Spreading:
    """A number above 0 that is not known exactly: the ends of its interval, and the median."""

    low: float
    middle: float
    high: float

    @classmethod
    def of(cls, draws: Floats, share: float) -> Spreading:
        tail = (1 - share) / 2
        low, middle, high = np.quantile(draws, (tail, 0.5, 1 - tail))
        return cls(float(low), float(middle), float(high))

    def widened(self, factor: float) -> Spreading:
        """Return an interval whose ends are farther from the middle, on a logarithmic scale."""
        return Spreading(
            self.middle * (self.low / self.middle) ** factor,
            self.middle,
            self.middle * (self.high / self.middle) ** factor,
        )

    def times(self, factor: float) -> Spreading:
        """Return all three numbers times a factor above 0."""
        return Spreading(self.low * factor, self.middle * factor, self.high * factor)

    def under(self, number: float) -> Spreading:
        """Return the interval of `number`, which is above 0, divided by this value."""
        return Spreading(number / self.high, number / self.middle, number / self.low)


@dataclass(frozen=True)
class Point:
    """The forecast for one number of hosts.

    Attributes:
        efficiency: the rate as a share of one host's rate times the number of hosts.
        marginal: increase of the rate per host added since the previous point, as a share of one
            host's rate.
        seconds: seconds that the epochs take; None where the number of samples is unknown.
        terms: median seconds of each term of a step, by name.
        is_range: whether the point is too far from the measured ranks for a number.
        growth: number of ranks divided by the largest measured number of ranks.
    """

    shape: Shape
    rate: Spreading
    efficiency: Spreading
    marginal: float
    seconds: Spreading | None
    cost: Spreading | None
    terms: Mapping[str, float]
    is_range: bool
    growth: float

    @property
    def hosts(self) -> int:
        return self.shape.hosts

    def as_dict(self) -> dict[str, Any]:
        """Return plain data; where the point is a range, only the ends of each interval."""
        return {
            "hosts": self.hosts,
            "ranks": self.shape.ranks,
            "batch_per_rank": self.shape.batch,
            "is_range": self.is_range,
            "growth": self.growth,
            **{
                name: None if item is None else _ends(item, self.is_range)
                for name, item in (
                    ("samples_per_s", self.rate),
                    ("efficiency", self.efficiency),
                    ("seconds", self.seconds),
                    ("cost", self.cost),
                )
            },
            "marginal_efficiency": None if self.is_range else self.marginal,
            "step_s": dict(self.terms),
        }


def _ends(spreading: Spreading, is_range: bool) -> list[float | None]:
    return [spreading.low, None if is_range else spreading.middle, spreading.high]


@dataclass(frozen=True)
class Side:
    """The forecast for one kind of machine.

    Attributes:
        price: name of a kind of host and its price per hour; None without prices.
    """

    measured: MeasuredRuns
    asked: ForecastOptions
    price: tuple[str, float] | None

    @cached_property
    def draws(self) -> MachineDraws:
        measured, asked = self.measured, self.asked
        draws, _ = self._calibrated
        rng, count = np.random.default_rng(2), len(draws.seconds)
        if measured.input_per_host is not None:
            draws = replace(draws, input=rng.uniform(*measured.input_per_host, count))
        if asked.storage is not None and (size := _bytes_read(measured.first)):
            total = asked.storage / size
            draws = replace(draws, total_input=rng.uniform(0.8 * total, total, count))
        return draws

    @property
    def contradiction(self) -> str:
        """A description of how the measured steps contradict the given network, or ""."""
        return self._calibrated[1]

    @property
    def notes(self) -> list[str]:
        """Notes on the measured runs, and on steps that contradict the given network."""
        return [*self.measured.notes, *filter(None, [self.contradiction])]

    @cached_property
    def _calibrated(self) -> tuple[MachineDraws, str]:
        measured, asked = self.measured, self.asked
        is_measured = isinstance(asked.network, Network)
        sent = sent_alone(asked.network, measured.job) if is_measured else []  # type: ignore[arg-type]
        prior = _with_network(measured.prior, asked)
        draws = calibrate(measured.job, prior, measured.rows, sent)
        crossing = [row for row in measured.rows if row.shape.hosts > 1 and not row.shape.silent]
        if asked.network is None or not crossing:
            return draws, ""
        last = max(crossing, key=lambda row: row.shape.ranks)
        said = _plain_seconds(measured.job, last, draws)
        off = abs(np.log(said / last.seconds))
        if off <= max(_CONTRADICTS, 4 * last.noise):
            return draws, ""
        for wider in (replace(prior, nic=_ANY_NIC), replace(prior, nic=_ANY_NIC, rtt=_ANY_RTT)):
            free = calibrate(measured.job, wider, measured.rows)
            if abs(np.log(_plain_seconds(measured.job, last, free) / last.seconds)) <= off / 2:
                break
        else:
            return draws, ""  # no other network explains the difference
        words = (
            f"{last.shape.hosts} hosts took {last.seconds * 1e3:.3g} ms a step, and would take "
            f"{said * 1e3:.3g} ms over the given network: the forecast uses the measured steps"
        )
        return free, words

    def shape(self, hosts: int, per_host: int | None = None) -> Shape:
        measured, asked = self.measured, self.asked
        per_host = per_host or asked.per_host or measured.per_host
        ranks = hosts * per_host
        batch = measured.job.batch if asked.keeps_rank_batch else measured.batch / ranks
        return Shape(hosts, per_host, batch)

    def rates(self, shape: Shape, job: Job | None = None) -> Floats:
        growth = shape.ranks / self.measured.most_ranks
        terms = step_terms(job or self.measured.job, shape, self.draws, growth=growth)
        return shape.samples / np.asarray(sum(terms.values()))

    @property
    def factor(self) -> float:
        """Factor by which intervals are widened that depend on the link between hosts."""
        return WIDENED["measured" if self.measured.has_crossed else "given"]

    @cached_property
    def points(self) -> list[Point]:
        points: list[Point] = []
        first = self.rates(self.shape(1))
        before, hosts_before = first, 1
        for hosts in self.asked.hosts:
            rates = self.rates(self.shape(hosts))
            marginal = 1.0
            if hosts > hosts_before:
                more = float(np.median((rates - before) / first))
                marginal = more / (hosts - hosts_before)
            points.append(self._point(hosts, rates, rates / first / hosts, marginal))
            before, hosts_before = rates, hosts
        return points

    def _point(self, hosts: int, rates: Floats, efficiency: Floats, marginal: float) -> Point:
        shape = self.shape(hosts)
        factor = self.factor if hosts > 1 else WIDENED["measured"]
        again = np.exp(_AGAIN * np.random.default_rng(3).standard_normal(len(rates)))
        rate = Spreading.of(rates * again, COVERED).widened(factor)
        seconds = self._seconds(rate, shape)
        cost = None
        if seconds is not None and self.price is not None:
            cost = seconds.times(self.price[1] * hosts / 3600)
        growth = shape.ranks / self.measured.most_ranks
        terms = step_terms(self.measured.job, shape, self.draws)
        return Point(
            shape=shape,
            rate=rate,
            efficiency=Spreading.of(efficiency, COVERED).widened(factor),
            marginal=marginal,
            seconds=seconds,
            cost=cost,
            terms={name: float(np.median(term)) for name, term in terms.items()},
            is_range=growth > FARTHEST,
            growth=growth,
        )

    @property
    def epochs(self) -> int | None:
        if self.asked.epochs is not None:
            return self.asked.epochs
        result = self.measured.first.job.get("epochs", "")
        return int(result) if result.isdecimal() else None

    def _seconds(self, rate: Spreading, shape: Shape) -> Spreading | None:
        run = self.measured.first
        samples, epochs = (run.data or {}).get("samples"), self.epochs
        if not samples or not epochs:
            return None
        each = max(1, len(run.epochs))
        evaluation = run.evaluation_s / each * run.world["size"] / shape.ranks
        other = run.startup_s + epochs * (evaluation + run.saving_s / each)
        steps = rate.under(samples * epochs)
        return Spreading(steps.low + other, steps.middle + other, steps.high + other)


@dataclass(frozen=True)
class Forecast:
    """A forecast for each kind of machine on which runs were measured."""

    asked: ForecastOptions
    sides: tuple[Side, ...]

    @classmethod
    def of(cls, runs: Sequence[str], asked: ForecastOptions) -> Forecast:
        """Read run folders and forecast from them, with one Side for each kind of machine.

        Raises:
            FlatoutError: a run cannot be read or used, or a needed option is missing.
        """
        measured = read_runs(runs, asked.settings)
        if max(asked.hosts) > 1:
            _check_network(asked.network, measured[0].profiles)
        if asked.budget and asked.prices is None:
            raise FlatoutError(
                "expected prices with a budget, found none",
                do="say them: --price c5.4xlarge=0.68 --currency USD",
            )
        prices = asked.prices.hosts if asked.prices is not None else ()
        if prices and len(prices) != len(measured):
            raise FlatoutError(
                f"expected a price for each kind of machine that the runs are of, {len(measured)}, "
                f"found {len(prices)}",
                do="give as many prices, in the order of the runs",
            )
        sides = [
            Side(item, asked, prices[place] if prices else None)
            for place, item in enumerate(measured)
        ]
        for side in sides:
            _check_batch(side)
        return cls(asked, tuple(sides))


def _plain_seconds(job: Job, row: StepTime, draws: MachineDraws) -> float:
    # The model's time of a step, without corrections from timed steps.
    return float(np.median(total_seconds(job, row, replace(draws, corrections=()))))


def _check_batch(side: Side) -> None:
    most = max(side.asked.hosts)
    if side.shape(most).batch < 1:
        raise FlatoutError(
            f"{most} hosts have {side.shape(most).ranks} ranks, more than the "
            f"{side.measured.batch:,.0f} samples of a batch",
            do="ask for fewer hosts, or let each rank keep its batch: --keep-rank-batch",
        )


def _check_network(network: Network | float | None, profiles: Sequence[Profile]) -> None:
    if network is None:
        raise _no_network(profiles)
    if isinstance(network, float) or network.links:
        return
    if not any(collective.hosts > 1 for collective in network.collectives):
        raise FlatoutError(
            f"expected figures of a network between hosts, found those of "
            f"{', '.join(network.hosts)} alone",
            do="measure between hosts, or say a line rate such as --network 10Gb",
        )


def _no_network(profiles: Sequence[Profile]) -> FlatoutError:
    speed = next(
        (
            profile.network["mbit_per_s"]
            for profile in profiles
            if profile.network and profile.network["mbit_per_s"]
        ),
        None,
    )
    hint = f"; the interface of a run says {speed} Mbit/s" if speed else ""
    return FlatoutError(
        f"several hosts cannot be forecast without the network between them{hint}",
        do="say its line rate, such as --network 10Gb --rtt 0.2ms, or name a file of what was "
        "measured: --network network.json",
    )


def _with_network(prior: Prior, asked: ForecastOptions) -> Prior:
    network = asked.network
    if network is None:
        return prior
    rtt = _RTT if asked.rtt is None else (0.8 * asked.rtt, 1.5 * asked.rtt)
    if isinstance(network, float):
        return replace(prior, nic=(TCP[0] * network, TCP[1] * network), rtt=rtt)
    if not network.links:
        return replace(prior, nic=_ANY_NIC, rtt=rtt)
    slowest = min(link.bytes_per_s for link in network.links)
    if asked.rtt is None:
        longest = max(link.rtt_s for link in network.links)
        rtt = (0.8 * longest, 1.5 * longest)
    low, high = _MEASURED_BAND
    return replace(prior, nic=(low * slowest, high * slowest), rtt=rtt)


def _bytes_read(profile: Profile) -> float | None:
    data = profile.data or {}
    if data.get("bytes") and data.get("samples"):
        return float(data["bytes"]) / float(data["samples"])
    result = profile.input.get("bytes_per_sample")
    return None if result is None else float(result)
