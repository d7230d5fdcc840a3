"""Two ranks on one node: what a step costs beside a handwritten loop, and a rank that is killed."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from restarts import Peer, Row, ratio
from results import Key

RAW, BOUND, FLATOUT, AGAIN = "raw-ddp", "raw-ddp-bound", "flatout-ddp", "flatout-ddp-again"
RECOVER_FIRST, RECOVER_SECOND = "recover-rank-0", "recover-rank-1"
# Besides importing torch, from the kill to the next step.
RECOVER_S = 3.0


def step_peers(epochs: int, samples: int) -> list[Peer]:
    """A training step of two ranks: by hand, each rank also bound to a core, and by Flatout."""
    arguments = ("--epochs", str(epochs), "--samples", str(samples))
    return [
        Peer(RAW, "ddp_raw.py", arguments, ("torch",)),
        Peer(BOUND, "ddp_raw.py", (*arguments, "--bound"), ("torch",)),
        Peer(FLATOUT, "ddp_flatout.py", arguments, ("torch", "flatout")),
        Peer(AGAIN, "ddp_flatout.py", arguments, ("torch", "flatout")),
    ]


def step_keys(rows: Mapping[str, Row]) -> list[Key]:
    """Against the faster of the two handwritten forms."""
    measured = [name for name in (RAW, BOUND) if rows[name].measured]
    best = min(measured, key=lambda name: median(rows[name].seconds), default=RAW)
    return [
        Key("ddp_vs_raw_ddp", ratio(rows, FLATOUT, best), at_most=1.03, note=f"over {best}"),
        Key("ddp_vs_itself", ratio(rows, AGAIN, FLATOUT), note="A/A: what noise makes of 1"),
    ]


def recover_peers() -> list[Peer]:
    """From the kill of a rank to the next step of all; its note is the import time of torch."""
    return [
        Peer(name, "recover.py", ("--rank", str(rank)), ("torch", "flatout"))
        for rank, name in enumerate((RECOVER_FIRST, RECOVER_SECOND))
    ]


def recover_keys(rows: Mapping[str, Row]) -> list[Key]:
    """The slower of both ranks' medians, at most 3 s and the import of torch in the same runs."""
    for name in (RECOVER_FIRST, RECOVER_SECOND):
        if not rows[name].measured:
            return [Key("recover_s", f"{name}: {rows[name].reason}", at_most=RECOVER_S)]
    both = [rows[name] for name in (RECOVER_FIRST, RECOVER_SECOND)]
    slowest = max(both, key=lambda row: median(row.seconds))
    imported = median(float(note) for row in both for note in row.notes)
    note = f"of which {RECOVER_S:g} s and {imported:.2f} s for importing torch are allowed"
    found = median(slowest.seconds)
    return [Key("recover_s", found, at_most=RECOVER_S + imported, note=note)]
