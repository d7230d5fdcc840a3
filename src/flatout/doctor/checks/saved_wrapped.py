"""A model was saved inside its wrapper, so its weights have names that the bare model lacks."""

from __future__ import annotations

from typing import Any

from flatout.doctor.checks.check import Check
from flatout.doctor.finding import Finding
from flatout.observe import Observation

_WRAPPERS = {
    "module.": "DataParallel and DistributedDataParallel",
    "_orig_mod.": "torch.compile",
}


def look(seen: Observation) -> list[Finding]:
    """Which saved names begin with a wrapper's prefix."""
    found = []
    for saved in seen.saved:
        names = [str(name) for name in saved.get("keys", ())]
        for prefix, wrapper in _WRAPPERS.items():
            wrapped = [name for name in names if name.startswith(prefix)]
            if wrapped and len(wrapped) == len(names):
                found.append(_found(saved, wrapped[0], prefix, wrapper))
    return found


def _found(saved: dict[str, Any], name: str, prefix: str, wrapper: str) -> Finding:
    return Finding(
        name="saved_wrapped",
        kind="note",
        what=f"weights are saved as {name}: the prefix {prefix} is that of {wrapper}, and the bare "
        "model does not load them",
        do=f"save {'model._orig_mod' if prefix == '_orig_mod.' else 'model.module'}.state_dict(); "
        "flatout export takes the prefix off files that are there already",
        number=39,
        where=_where(saved),
        parity="bit-identical",
    )


def _where(saved: dict[str, Any]) -> str:
    site = saved.get("site")
    return f"{site['file']}:{site['line']}" if isinstance(site, dict) else str(site or "")


CHECK = Check("saved_wrapped", (39,), look)
