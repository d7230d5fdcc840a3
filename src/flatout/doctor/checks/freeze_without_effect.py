"""Check for attempts to freeze parameters that have no effect."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, check
from flatout.doctor.checks.signals import at, few, models
from flatout.doctor.finding import Finding
from flatout.observe import Observation, Unfrozen


@check()
def look(observation: Observation) -> Findings:
    """Report attributes set to False that torch does not read, on parameters of an optimizer."""
    models(observation)
    for item in observation.unfrozen:
        yield Finding(
            kind="danger",
            what=f"{_words(item)}: {item.parameters} parameters ({item.elements:,} numbers) train "
            f"on: {few(item.names)}",
            do="requires_grad_(False) on the module, which sets it for each parameter in it",
            where=at(item.site),
            parity="changes learning",
        )


def _words(item: Unfrozen) -> str:
    if item.kind:
        return f"requires_grad = False on a module ({item.kind}) changes nothing"
    return f"{item.name} = False freezes nothing, as torch's name is requires_grad"
