"""Samples of the validation are trained on."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import at
from flatout.doctor.finding import Finding
from flatout.observe import Observation

_MANY = 0.01
"""Share of the validation that equals a training sample, from which on it is no chance."""

_ALL = 0.995
"""From here on it is the training data: that may be meant, to see how well they are fitted."""


@check()
def look(seen: Observation) -> Findings:
    """How many samples are equal to the byte, of loaders that are only evaluated."""
    evaluated = [one for one in seen.loaders if not one.in_training]
    known = [one for one in evaluated if one.shared_rows is not None]
    if evaluated and not known:
        raise NoSignal("the samples of training and validation are not held as one table each")
    shares = [shared / of for one in known for shared, of in [one.shared_rows or (0, 1)]]
    for loader, share in zip(known, shares, strict=True):
        shared, of = loader.shared_rows or (0, 1)
        if share < _MANY or (share >= _ALL and len(known) > 1):
            continue
        is_all = share >= _ALL
        yield Finding(
            kind="note" if is_all else "danger",
            what=f"{shared:,} of the {of:,} samples that are evaluated here equal one of training "
            f"to the byte ({100 * share:.0f}%): "
            + ("it says nothing of new data" if is_all else "their figures are too good"),
            do="split once, by sample or by what it comes from, before you copy or augment any",
            where=at(loader.site),
            parity="changes learning",
        )
