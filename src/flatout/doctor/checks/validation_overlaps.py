"""Check for validation samples that are trained on."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, check
from flatout.doctor.checks.signals import at, held_out
from flatout.doctor.finding import Finding
from flatout.observe import Loader, Observation, Table

_MANY = 0.01
"""Share of validation samples equal to a training sample from which on it is no chance."""

_MANY_WINDOWS = 0.3
"""Share of validation samples that are a training sample shifted by one time step.

Smaller shares occur where a series is split into two parts.
"""

_ALL = 0.995
"""Share of validation samples from which on all of them count as trained on."""

_WHOLE = 0.9
"""Length relative to the training data from which on the training data itself is evaluated.

Evaluating the training data may be intended, to measure how well the model fits.
"""


@check()
def look(observation: Observation) -> Findings:
    """Report evaluated loaders and tables whose samples are trained on."""
    known = held_out(observation)
    several = len({(str(item.site), item.length) for item in known}) > 1
    shares = [shared / of for item in known for shared, of in [item.shared_rows or (0, 1)]]
    for part, share in zip(known, shares, strict=True):
        shared, of = part.shared_rows or (0, 1)
        if share < _MANY and part.shared_windows >= _MANY_WINDOWS * of:
            yield _of_windows(part, of)
        if share < _MANY or (share >= _ALL and several):
            continue
        is_meant = share >= _ALL and _is_as_long(observation, part)
        yield Finding(
            kind="note" if is_meant else "danger",
            what=f"{shared:,} of the {of:,} samples that are evaluated here {_same(part)} "
            f"({100 * share:.0f}%): "
            + ("it says nothing of new data" if is_meant else "their figures are too good"),
            do="split once, by sample or by what it comes from, before you copy or augment any",
            where=at(part.site),
            parity="changes learning",
        )


def _of_windows(part: Loader | Table, of: int) -> Finding:
    return Finding(
        kind="danger",
        what=f"{part.shared_windows:,} of the {of:,} samples that are evaluated here are windows "
        f"that training has moved by one step ({100 * part.shared_windows / of:.0f}%): what they "
        "are to foretell was trained on",
        do="split the series by time, then cut windows of each part",
        where=at(part.site),
        parity="changes learning",
    )


def _is_as_long(observation: Observation, part: Loader | Table) -> bool:
    trained = [item.length for item in observation.inputs if item.in_training]
    return any((part.length or 0) >= _WHOLE * (length or 0) for length in trained)


def _same(part: Loader | Table) -> str:
    if part.shared_files:
        return "are read from the same files as some of training"
    return "equal one of training to the byte"
