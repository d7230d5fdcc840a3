"""Check for models saved inside a wrapper, with names of weights that the bare model lacks."""

from __future__ import annotations

from collections.abc import Sequence

from flatout.doctor.checks.check import Findings, check
from flatout.doctor.checks.signals import models
from flatout.doctor.edits.models import save_bare
from flatout.doctor.finding import Finding
from flatout.observe import Model, Observation

_PARALLEL = ("DataParallel", "DistributedDataParallel")


@check(edit=save_bare)
def look(observation: Observation) -> Findings:
    """Report saved names that begin with the prefix of the model's wrapper."""
    trained = models(observation)
    names = [str(name) for saved in observation.saved for name in saved.get("keys", ())]
    for prefix, attribute in _prefixes(trained):
        wrapped = [n for n in names if n.startswith(prefix) or f".{prefix}" in n]
        if wrapped:
            yield _finding(observation, wrapped[0], prefix, attribute)


def _prefixes(trained: Sequence[Model]) -> list[tuple[str, str]]:
    result = []
    if any(model.wrapper in _PARALLEL for model in trained):
        result.append(("module.", "model.module"))
    if any(model.is_compiled for model in trained):
        result.append(("_orig_mod.", "model._orig_mod"))
    return result


def _finding(observation: Observation, name: str, prefix: str, attribute: str) -> Finding:
    saves = [call.site for call in observation.calls if call.kind == "save"]
    return Finding(
        kind="note",
        what=f"weights are saved under names such as {name}: {prefix} is the wrapper's, and the "
        "model without the wrapper does not load them",
        do=f"save {attribute}.state_dict(); flatout export takes the prefix off files that have it",
        where=str(saves[0]) if saves else "",
        parity="bit-identical",
    )
