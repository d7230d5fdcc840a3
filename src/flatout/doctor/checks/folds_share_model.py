"""Check for one model that is trained on all folds of a cross-validation."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, check
from flatout.doctor.checks.signals import at, models
from flatout.doctor.finding import Finding
from flatout.observe import Observation


@check()
def look(observation: Observation) -> Findings:
    """Report models made before the loop over the folds and never reset in it."""
    models(observation)
    for item in observation.shared_folds:
        yield Finding(
            kind="danger",
            what=f"{item.model}, made before the loop over the {item.folds} folds of {item.kind}, "
            "is trained on all of them: from the second on it validates on samples that it was "
            "trained on in the folds before",
            do="make the model and its optimizer within the loop, for each fold",
            where=at(item.site),
            parity="changes learning",
        )
