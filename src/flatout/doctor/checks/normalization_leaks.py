"""Check for normalization that was fitted on validation samples too."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, check
from flatout.doctor.checks.signals import at, held_out
from flatout.doctor.finding import Finding
from flatout.observe import Observation, Scaling


@check()
def look(observation: Observation) -> Findings:
    """Report scalers or statistics that were fitted on training and validation samples together."""
    for part in held_out(observation):
        scaling = part.scaling
        if scaling is None:
            continue
        yield Finding(
            kind="danger",
            what=_words(scaling),
            do="split first; fit on the training samples, and use the same figures for the others",
            where=at(scaling.site or part.site),
            parity="changes learning",
        )


def _words(scaling: Scaling) -> str:
    verb = "were" if " " in scaling.by else "was"
    words = (
        f"{scaling.by} {verb} fitted on {scaling.samples:,} samples, {scaling.held_out:,} of "
        "which are not trained on"
    )
    if scaling.off is not None and scaling.off_training is not None:
        held = "the mean that the dataset holds is that of all" if scaling.is_held else ""
        words += (
            f": {held or 'the mean of all is 0'} (off by {scaling.off:.0e}), that of training "
            f"alone is off by {scaling.off_training:.0e}"
        )
    if scaling.by == "median":
        words += ": the median of all is 0 in each column, that of training alone is not"
    if scaling.misses is not None:
        both = "the ends that the dataset holds are those of all"
        both = both if scaling.is_held else "all together reach both ends of their range"
        words += f": {both}, training alone stays {scaling.misses:.2g} away from one"
    return words
