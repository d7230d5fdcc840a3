"""Draws of the unknown values of a machine and a network that agree with timed steps.

Draws from the prior get weights by their agreement with the timed steps, and are resampled by
weight (importance sampling; Rubin, "Using the SIR algorithm", 1988). A value that the timed steps
do not determine stays as uncertain as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import exp, log
from statistics import fmean

import numpy as np

from flatout.forecast.job import Floats, Job, Prior, Range, ReductionTime, StepTime
from flatout.forecast.step import MachineDraws, sending, step_terms

# _DRAWS: number of draws from the prior; _KEPT: number of draws that are resampled by weight,
# enough for the printed quantiles.
_DRAWS, _KEPT = 20_000, 4_000
# Effective number of draws (1 / sum of squared weights) below which the weights are made more
# equal.
_FEWEST = 200
# Exponent in the prior of `hidden` (a share of sending): 1 makes all shares equally likely, 0.7
# gives a mean of 0.6. Most frameworks send gradients as soon as they are ready.
_SOONER = 0.7
# Degrees of freedom of the errors, whose tails are longer than normal: rows of one table may come
# from different days.
_FREEDOM = 4.0


def calibrate(
    job: Job,
    prior: Prior,
    rows: Sequence[StepTime],
    sent: Sequence[ReductionTime] = (),
    seed: int = 0,
) -> MachineDraws:
    """Return draws that agree with the timed steps, and with reductions that were timed alone."""
    rows = sorted(rows, key=lambda row: (row.shape.silent, row.shape.ranks))
    rng = np.random.default_rng(seed)
    draws = _drawn(prior, rng)
    first = rows[0]
    wanted = first.seconds * np.exp(first.noise * rng.standard_normal(_DRAWS))
    draws = replace(draws, seconds=_solved(job, first, draws, wanted))
    off = [
        (np.log(total_seconds(job, row, draws)) - np.log(row.seconds)) / row.noise for row in rows
    ]
    # The model's errors are alike at all sizes, so all reductions together count as a single
    # measurement.
    alike = len(sent) ** 0.5
    off += [
        (np.log(sending(job, item, draws)) - np.log(item.seconds)) / (alike * item.noise)
        for item in sent
    ]
    draws = draws.take(_chosen(off, rng))
    return replace(draws, corrections=_corrections(job, rows, draws))


def total_seconds(job: Job, row: StepTime, draws: MachineDraws, *, growth: float = 1.0) -> Floats:
    """Return the seconds of a step of this shape, see `step_terms`."""
    return np.asarray(sum(step_terms(job, row.shape, draws, growth=growth).values()))


def _corrections(
    job: Job, rows: Sequence[StepTime], draws: MachineDraws
) -> tuple[tuple[int, float], ...]:
    # By number of ranks, the ratio of the timed step to the model's step.
    off: dict[int, list[float]] = {}
    for row in rows:
        if not row.shape.silent:
            said = float(np.median(total_seconds(job, row, draws)))
            off.setdefault(row.shape.ranks, []).append(log(row.seconds / said))
    return tuple((ranks, exp(fmean(each))) for ranks, each in sorted(off.items()))


def _drawn(prior: Prior, rng: np.random.Generator) -> MachineDraws:
    def even(spread: Range) -> Floats:
        return rng.uniform(*spread, _DRAWS)

    def by_size(spread: Range | None) -> Floats:
        if spread is None:
            return np.full(_DRAWS, np.inf)
        low, high = map(log, spread)
        return np.asarray(np.exp(rng.uniform(low, high, _DRAWS)))

    return MachineDraws(
        seconds=np.ones(_DRAWS),
        fixed=even(prior.fixed),
        contention=by_size(prior.contention),
        power=even(prior.power),
        spread=by_size(prior.spread),
        hidden=prior.hidden[0] + np.ptp(prior.hidden) * rng.uniform(size=_DRAWS) ** _SOONER,
        rtt=by_size(prior.rtt),
        nic=by_size(prior.nic),
        summing=by_size(prior.summing),
        inside=by_size(prior.inside),
        input=by_size(prior.input),
        total_input=by_size(prior.total_input),
    )


def _solved(job: Job, row: StepTime, draws: MachineDraws, wanted: Floats) -> Floats:
    unlimited = replace(draws, input=np.full(_DRAWS, np.inf), total_input=np.full(_DRAWS, np.inf))
    result = wanted
    for _ in range(30):
        terms = step_terms(job, row.shape, replace(unlimited, seconds=result))
        busy = sum(terms.values()) - terms["gradient sync"]
        after = result * np.maximum(wanted - terms["gradient sync"], 0.01 * wanted) / busy
        if np.allclose(after, result, rtol=1e-4):
            return after
        result = after
    return result


def _chosen(
    off: Sequence[Floats], rng: np.random.Generator
) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    wider = 1.0
    while True:
        fits = sum(-(_FREEDOM + 1) / 2 * np.log1p((z / wider) ** 2 / _FREEDOM) for z in off)
        weights = np.exp(fits - np.max(fits))
        weights /= weights.sum()
        if 1 / np.square(weights).sum() >= _FEWEST:
            break
        wider *= 1.25
    # Evenly spaced along the sum of weights, so that chance adds little.
    points = (np.arange(_KEPT) + rng.uniform()) / _KEPT
    return np.minimum(np.searchsorted(np.cumsum(weights), points), _DRAWS - 1)
