"""What more hosts give, from what runs measured of themselves.

    Forecast.of(["runs/today"], ForecastOptions(hosts=(1, 2, 4), network=parse_rate("10Gb")))

Every number has an interval: of all that is not known of the machine and the network, widened by
how far off this very model is on published series (`judge.py`). Beyond four times what was measured
there is a range, and no number. Time to an accuracy is never forecast: how many samples that needs
depends on the batch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib.resources import files
from typing import Any

import numpy as np

from flatout.errors import FlatoutError
from flatout.forecast.calibrate import calibrate, total_seconds
from flatout.forecast.collectives import Floats
from flatout.forecast.interval import Spreading
from flatout.forecast.job import Job, Prior, Range, Shape, StepTime
from flatout.forecast.network import Network
from flatout.forecast.prices import Prices
from flatout.forecast.profiled import TCP, MeasuredRuns, read_runs, sent_alone
from flatout.forecast.step import MachineDraws, step_terms
from flatout.measure import Profile

COVERED = 0.9
FARTHEST = 4.0
"""Times the ranks that were measured, up to where a number is said."""
# Of links that were measured: tomorrow, and with other hosts on the same switch.
_MEASURED_BAND: Range = (0.8, 1.05)
# Where no round trip is said: of hosts of one data center.
_RTT: Range = (5e-5, 5e-4)
_AGAIN = 0.015
# Least difference of logarithms at which timed steps contradict a network.
_CONTRADICTS = 0.05
# Ranges for a network whose figures are ignored.
_ANY_NIC: Range = (1e6, 5e10)
_ANY_RTT: Range = (1e-6, 1e-2)


@dataclass(frozen=True)
class ForecastOptions:
    """What the user wants to know.

    Attributes:
        hosts: how many of them, each number above 0.
        per_host: ranks on each; None is as in the largest run.
        network: what was measured, or bytes per second of a host's line; None is not known.
        rtt: seconds, of a message between hosts; None is not known.
        epochs: of how many hours and costs are; None is as in the run.
        prices: of hosts.
        deadline: seconds.
        budget: in the currency of the prices.
        efficiency: bound of what a further host must give, of what the first does.
        keeps_rank_batch: whether each rank keeps its batch, instead of all together keeping theirs.
        storage: bytes per second that all hosts together can read; None is no limit.
        settings: of `world`, in place of what the runs had.
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
class Point:
    """What so many hosts give.

    Attributes:
        shape: of the ranks.
        rate: samples per second.
        efficiency: as a share of what as many hosts would give if each gave what one does.
        marginal: what each host more than in the line before gives, of what one does.
        seconds: of the epochs; None where the number of samples is not known.
        cost: in the currency of the prices; None without them.
        terms: medians of what a step's seconds are made of.
        is_range: whether it is too far from what was measured for a number.
        growth: its ranks as a multiple of the most that were measured.
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
        """How many."""
        return self.shape.hosts

    @property
    def exposed(self) -> float:
        """What share of a step goes to adding up gradients."""
        return self.terms["gradient sync"] / sum(self.terms.values())

    def as_dict(self) -> dict[str, Any]:
        """Plain data; of a range the ends alone."""
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
    """One kind of machine.

    Attributes:
        measured: what runs on it tell.
        asked: what is wanted.
        price: of a host per hour, with its name; None without prices.
    """

    measured: MeasuredRuns
    asked: ForecastOptions
    price: tuple[str, float] | None

    @cached_property
    def draws(self) -> MachineDraws:
        """What its machines and network may be."""
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
        """Words for how the measured steps contradict the given network; "" if they agree."""
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
            return draws, ""  # another network would not explain the difference
        words = (
            f"{last.shape.hosts} hosts took {last.seconds * 1e3:.3g} ms a step, and would take "
            f"{said * 1e3:.3g} ms over the given network: the forecast uses the measured steps"
        )
        return free, words

    def shape(self, hosts: int, per_host: int | None = None) -> Shape:
        """So many hosts, with the batch that each rank would have."""
        measured, asked = self.measured, self.asked
        per_host = per_host or asked.per_host or measured.per_host
        ranks = hosts * per_host
        batch = measured.job.batch if asked.keeps_rank_batch else measured.batch / ranks
        return Shape(hosts, per_host, batch)

    def rates(self, shape: Shape, job: Job | None = None) -> Floats:
        """Samples per second, a draw in each place."""
        growth = shape.ranks / self.measured.most_ranks
        terms = step_terms(job or self.measured.job, shape, self.draws, growth=growth)
        return shape.samples / np.asarray(sum(terms.values()))

    @property
    def factor(self) -> float:
        """By how much intervals are widened where the link between hosts plays a part."""
        return widenings()["measured" if self.measured.has_crossed else "given"]

    @cached_property
    def points(self) -> list[Point]:
        """What each of the asked numbers of hosts gives."""
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
        factor = self.factor if hosts > 1 else widenings()["measured"]
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
        """Of which hours and costs are."""
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
    """What more hosts give, on each kind of machine that runs were measured on."""

    asked: ForecastOptions
    sides: tuple[Side, ...]

    @classmethod
    def of(cls, runs: Sequence[str], asked: ForecastOptions) -> Forecast:
        """Read runs and forecast from them.

        Args:
            runs: folders; those on other machines are another side.
            asked: what is wanted.

        Raises:
            FlatoutError: a run cannot be read or used; something that is needed was not said.
        """
        measured = read_runs(runs, asked.settings)
        if max(asked.hosts) > 1:
            _check_network(asked.network, measured[0].profiles)
        if (asked.deadline or asked.budget) and asked.budget and asked.prices is None:
            raise FlatoutError(
                "expected prices beside a budget, found none",
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
    """Return the model's time of a step, without corrections from timed steps."""
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


@cache
def widenings() -> dict[str, float]:
    """By how much intervals are widened, as `judge.widening` found."""
    text = (files("flatout.forecast") / "widening.json").read_text("utf-8")
    result: dict[str, float] = json.loads(text)
    return result
