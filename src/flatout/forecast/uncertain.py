"""Which unknown makes a forecast least certain, and what measurement would tell it."""

from __future__ import annotations

import numpy as np

from flatout.forecast.collectives import Floats
from flatout.forecast.step import MachineDraws

_BINS = 10
# What is unknown, in words, and what would tell it.
MEASUREMENTS = {
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


def shares(draws: MachineDraws, rates: Floats) -> dict[str, float]:
    """What share of the variance of log(rate) each unknown explains alone.

    First-order Sobol indices by binning each draw (Saltelli et al., "Global Sensitivity Analysis",
    2008); of unknowns that are measured together the largest.
    """
    log = np.log(rates)
    whole = float(log.var())
    if whole < 1e-12:
        return dict.fromkeys(MEASUREMENTS, 0.0)
    return {
        name: max(_explained(getattr(draws, unknown), log) for unknown in unknowns) / whole
        for name, (unknowns, _) in MEASUREMENTS.items()
    }


def _explained(unknown: Floats, log: Floats) -> float:
    if not np.isfinite(unknown).all() or np.ptp(unknown) == 0:  # no limit, or known exactly
        return 0.0
    bins = np.array_split(log[np.argsort(unknown, kind="stable")], _BINS)
    # Of bins without any effect the means still vary by chance.
    chance = float(np.mean([bin.var() / len(bin) for bin in bins]))
    return max(0.0, float(np.var([bin.mean() for bin in bins])) - chance)
