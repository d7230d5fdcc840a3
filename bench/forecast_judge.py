"""How far off the model is on published series: calibrated on first rows, it predicts others.

    judged = judge()
    widening(judged)     # by how much intervals are widened, by whether the link was calibrated on

The rule is the same for all series and was set before any was looked at: the model is calibrated on
each beginning of a series of two rows or more (of one, where there are but two) and predicts all
rows after it. Intervals are widened by what the *other* series' errors ask for, so no series has a
say in its own (conformal prediction, leave-one-series-out; Lei et al., "Distribution-Free
Predictive Inference for Regression", 2018).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, median

import numpy as np

from flatout.forecast.calibrate import calibrate, total_seconds
from flatout.forecast.forecast import COVERED, FARTHEST, Spreading
from forecast_series import Series, series, with_input

DEADLINES = (0.9, 0.75, 0.6, 0.4, 0.3)
"""Shares of the time that the largest calibrated size takes."""
# More devices than before give less than this share of what as many gave before: it saturates.
_SATURATES, _SEEN_AS = 0.75, 0.8
# The least width of an interval, as a logarithm, where all draws are the same.
_NARROWEST = 1e-4


@dataclass(frozen=True)
class Case:
    """One prediction, and what was published.

    Attributes:
        series: of which it is.
        rows: how many it was calibrated on.
        place: of the row that is predicted.
        growth: its devices as a multiple of the largest calibrated row's.
        is_crossing: whether it is the first row on several hosts, or such a row when none was
            calibrated on: the network is known from its line rate alone.
        predicted: the rate, with its interval before it is widened.
    """

    series: Series
    rows: int
    place: int
    growth: float
    is_crossing: bool
    predicted: Spreading

    @property
    def truth(self) -> float:
        """The published rate."""
        return self.series.rates[self.place]

    @property
    def error(self) -> float:
        """Of the predicted rate, as a share of the published one."""
        return self.predicted.middle / self.truth - 1

    @property
    def score(self) -> float:
        """How far off it is, in half widths of the interval on that side."""
        return score(self.predicted, self.truth)

    @property
    def is_number(self) -> bool:
        """Or a range."""
        return self.growth <= FARTHEST

    @property
    def marginal(self) -> tuple[float, float]:
        """What more devices than the row before gave, as a share of what as many gave there.

        Published, and predicted from that row's published rate.
        """
        before = self.place - 1
        shapes, rates = self.series.shapes, self.series.rates
        ideal = rates[before] * shapes[self.place].ranks / shapes[before].ranks
        return self.truth / ideal, self.predicted.middle / ideal


def score(interval: Spreading, truth: float) -> float:
    """Return 0 for a truth at the middle, and 1 for one at the interval's end on that side."""
    end = interval.high if truth > interval.middle else interval.low
    half = max(_NARROWEST, abs(math.log(end / interval.middle)))
    return abs(math.log(truth / interval.middle)) / half


def conformal_factor(scores: Sequence[float], share: float) -> float:
    """Return the factor that widens intervals so that they hold this share of the truths.

    The quantile of split conformal prediction, ceil((n + 1) share) of n scores; Vovk, Gammerman
    and Shafer, "Algorithmic Learning in a Random World", 2005. It is less than 1 where intervals
    were wider than errors are.
    """
    ordered = sorted(scores)
    place = math.ceil((len(ordered) + 1) * share)
    return ordered[min(place, len(ordered)) - 1]


def judge(wanted: Iterable[Series] | None = None) -> list[Case]:
    """Predict all rows of all series that can be predicted."""
    cases = []
    for item in series() if wanted is None else wanted:
        count = len(item.shapes)
        for rows in range(min(2, count - 1), count):
            cases += predicted(item, rows)
    return cases


def predicted(series: Series, rows: int) -> list[Case]:
    """Calibrate the model on the first rows of a series, and predict the other rows."""
    known = [series.row(place) for place in range(rows)]
    prior = series.prior
    if series.reads_files:
        fastest = max(
            rate / shape.hosts
            for rate, shape in zip(series.rates[:rows], series.shapes, strict=False)
        )
        prior = with_input(series, fastest)
    draws = calibrate(series.job, prior, known)
    has_crossed = any(row.shape.hosts > 1 for row in known)
    largest, cases = max(row.shape.ranks for row in known), []
    rng = np.random.default_rng(1)
    for place in range(rows, len(series.shapes)):
        row = series.row(place)
        seconds = total_seconds(series.job, row, draws, growth=row.shape.ranks / largest)
        seconds = seconds * np.exp(row.noise * rng.standard_normal(len(seconds)))
        cases.append(
            Case(
                series=series,
                rows=rows,
                place=place,
                growth=row.shape.ranks / largest,
                is_crossing=row.shape.hosts > 1 and not has_crossed,
                predicted=Spreading.of(row.shape.samples / seconds, COVERED),
            )
        )
    return cases


def factor_without(cases: Sequence[Case], one: Case) -> float:
    """By how much a case's interval is widened: by the other series' errors, of cases like it."""
    return conformal_factor([case.score for case in cases if _is_other(case, one)], COVERED)


def _is_other(case: Case, one: Case) -> bool:
    is_alike = case.is_number and case.is_crossing == one.is_crossing
    return is_alike and (case.series.source, case.series.name) != (
        one.series.source,
        one.series.name,
    )


def widening(cases: Sequence[Case]) -> dict[str, float]:
    """By how much a forecast's intervals are widened: by all series' errors."""
    return {
        name: round(
            conformal_factor(
                [
                    case.score
                    for case in cases
                    if case.is_number and case.is_crossing is is_crossing
                ],
                COVERED,
            ),
            2,
        )
        for name, is_crossing in (("measured", False), ("given", True))
    }


def covered(cases: Sequence[Case], among: Sequence[Case]) -> float:
    """The share of cases whose published rate lies within the widened interval."""
    inside = [case.score <= factor_without(among, case) for case in cases]
    return sum(inside) / len(inside)


def saturating(cases: Sequence[Case]) -> list[Case]:
    """Cases of rows that saturate, each predicted from all rows before it."""
    return [case for case in _next_doublings(cases) if case.marginal[0] < _SATURATES]


def scaling(cases: Sequence[Case]) -> list[Case]:
    """Likewise of rows that clearly do not."""
    return [case for case in _next_doublings(cases) if case.marginal[0] >= _SEEN_AS]


def _next_doublings(cases: Sequence[Case]) -> list[Case]:
    return [
        case
        for case in cases
        if case.rows == case.place and case.place > 0 and math.isclose(case.growth, 2.0)
    ]


def is_seen(case: Case) -> bool:
    """Whether the model says of a row that saturates that it does."""
    return case.marginal[1] < _SEEN_AS


def decision_regrets(cases: Sequence[Case]) -> list[float]:
    """What choosing a size by the model costs, of each beginning of a series and each deadline.

    Of the sizes that get a number, and those calibrated on, the cheapest is wanted that does a job
    within a share of the time that the largest calibrated size takes, at a price per device and
    hour. The regret of the model's choice is by how much more it costs than the best choice would,
    or by how much it is late, if that is more. Where no size is in time, none is asked.
    """
    result = []
    beginnings: dict[tuple[str, str, int], list[Case]] = {}
    for case in cases:
        if case.is_number:
            key = (case.series.source, case.series.name, case.rows)
            beginnings.setdefault(key, []).append(case)
    for alike in beginnings.values():
        series, rows = alike[0].series, alike[0].rows
        truths = [*series.rates[:rows], *(case.truth for case in alike)]
        said = [*series.rates[:rows], *(case.predicted.middle for case in alike)]
        ranks = [shape.ranks for shape in series.shapes[: len(truths)]]
        for share in DEADLINES:
            needed = series.rates[rows - 1] / share
            best, chosen = (_cheapest(ranks, rates, needed) for rates in (truths, said))
            if best is None or chosen is None:
                continue
            costs = [count / rate for count, rate in zip(ranks, truths, strict=True)]
            late = needed / truths[chosen] - 1
            result.append(max(costs[chosen] / costs[best] - 1, late, 0.0))
    return result


def _cheapest(ranks: Sequence[int], rates: Sequence[float], needed: float) -> int | None:
    enough = [place for place, rate in enumerate(rates) if rate >= needed]
    return min(enough, key=lambda place: ranks[place] / rates[place], default=None)


def keys(cases: Sequence[Case]) -> dict[str, float]:
    """What the model is judged by, over the series it was not built with."""
    judged = [case for case in cases if case.series.is_judged]
    result: dict[str, float] = {}
    for name, is_crossing in (("", False), ("_given", True)):
        alike = [case for case in judged if case.is_number and case.is_crossing is is_crossing]
        result[f"published_error_2x{name}"] = _median_error(c for c in alike if c.growth <= 2)
        result[f"published_error_4x{name}"] = _median_error(c for c in alike if c.growth > 2)
        result[f"published_covered{name}"] = covered(alike, cases)
        saturate = [case for case in saturating(judged) if case.is_crossing is is_crossing]
        if saturate:
            result[f"collapse_predicted{name}"] = sum(map(is_seen, saturate)) / len(saturate)
        others = [case for case in scaling(judged) if case.is_crossing is is_crossing]
        result[f"collapse_mistaken{name}"] = sum(map(is_seen, others)) / len(others)
    result["decision_regret"] = mean(decision_regrets(judged))
    result["range_covered"] = covered([case for case in judged if not case.is_number], cases)
    return result


def _median_error(cases: Iterable[Case]) -> float:
    return median(abs(case.error) for case in cases)
