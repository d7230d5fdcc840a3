"""Samples of the validation are trained on."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, check
from flatout.doctor.checks.signals import at, held_out
from flatout.doctor.finding import Finding
from flatout.observe import Observation

_MANY = 0.01
"""Share of the validation that equals a training sample, from which on it is no chance."""

_ALL = 0.995
"""From here on it is the training data: that may be meant, to see how well they are fitted."""


@check()
def look(observation: Observation) -> Findings:
    """How many samples are equal to the byte, of loaders and tables that are only evaluated."""
    known = held_out(observation)
    shares = [shared / of for item in known for shared, of in [item.shared_rows or (0, 1)]]
    for part, share in zip(known, shares, strict=True):
        shared, of = part.shared_rows or (0, 1)
        if share < _MANY or (share >= _ALL and len(known) > 1):
            continue
        is_all = share >= _ALL
        yield Finding(
            kind="note" if is_all else "danger",
            what=f"{shared:,} of the {of:,} samples that are evaluated here equal one of training "
            f"to the byte ({100 * share:.0f}%): "
            + ("it says nothing of new data" if is_all else "their figures are too good"),
            do="split once, by sample or by what it comes from, before you copy or augment any",
            where=at(part.site),
            parity="changes learning",
        )
