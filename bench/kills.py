"""Kill more than a thousand processes at random and by aim, and check the results.

    python bench/kills.py [--kills N] [--seed 1] [--only KIND ...] [--json [FILE]]

Each series works in its own folder, is killed several times by SIGKILL, and goes on until its work
is done. No work may be lost, and no process may hang or survive. The bench kills only processes
that it has started. A seed repeats the choices. The exit code is 1 if a fault was found.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

from flatout.processes import adopt_orphans
from killed.fits import FITS
from killed.leftovers import shared_memory, still_there
from killed.processes import Hang, Lost, strays
from killed.ranks import AGENTS, RANKS
from killed.saves import MERGED, PIECES
from killed.series import Kind, Outcome
from killed.strategies import STRATEGIES
from killed.tables import CACHES, CONVERTS
from killed.workers import WORKERS
from restarts import each, tell
from results import Key, Results, add_json_argument, add_limits, finish, positive

KINDS = {
    kind.name: kind
    for kind in (
        FITS,
        RANKS,
        AGENTS,
        *STRATEGIES,
        WORKERS,
        MERGED,
        PIECES,
        CACHES,
        CONVERTS,
    )
}
ALL = sum(kind.kills for kind in KINDS.values())
NOTHING = ("lost", "hangs", "strays", "leftovers")


@dataclass
class Tally:
    """What all series of a kind came to."""

    kills: Counter[str] = field(default_factory=Counter)
    found: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in NOTHING})
    series: int = 0
    seconds: float = 0.0

    def add(self, outcome: Outcome) -> None:
        self.series += 1
        self.kills.update(outcome.kills)
        for name in NOTHING:
            self.found[name] += getattr(outcome, name)


def killed(kind: Kind, kills: int, seed: int, base: Path, keep: bool, tally: Tally) -> None:
    """Run series of one kind until they have the wanted number of kills."""
    began = time.monotonic()
    folder = base / kind.name
    folder.mkdir()
    known = kind.prepare(folder)
    while tally.kills.total() < kills:
        own = f"{seed}.{kind.name}.{tally.series}"
        place = folder / own
        place.mkdir()
        outcome = one_series(kind, place, min(kind.each, kills - tally.kills.total()), own, known)
        tally.add(outcome)
        tally.seconds = time.monotonic() - began
        bad = [f"{name}: {words}" for name in NOTHING for words in getattr(outcome, name)]
        tell(
            f"{own}: {tally.kills.total()} of {kills} kills, {tally.seconds:.0f} s"
            + "".join(f"\n  {words}" for words in bad)
        )
        if not (bad and keep):
            shutil.rmtree(place)


def one_series(kind: Kind, place: Path, kills: int, own: str, known: object) -> Outcome:
    outcome = Outcome()
    shared = shared_memory()
    try:
        kind.run(place, kills, random.Random(own), known, outcome)
    except Lost as lost:
        outcome.lost.append(f"{lost} (after {outcome.kills})")
    except Hang as hang:
        outcome.hangs.append(f"{hang} (after {outcome.kills})")
    finally:
        left = strays()
    if not (outcome.lost or outcome.hangs):
        outcome.strays += left
        outcome.leftovers += still_there(shared_memory() - shared)
    return outcome


def results(tallies: dict[str, Tally], seed: int) -> Results:
    lines = [
        [
            KINDS[name].what,
            str(tally.kills.total()),
            str(tally.series),
            *(str(len(tally.found[one])) for one in NOTHING),
            f"{tally.seconds / 60:.1f} min",
        ]
        for name, tally in tallies.items()
    ]
    totals = {one: sum(len(tally.found[one]) for tally in tallies.values()) for one in NOTHING}
    kills = sum(tally.kills.total() for tally in tallies.values())
    return Results(
        title=f"Killed at random, seed {seed}",
        headers=["", "kills", "series", *NOTHING, ""],
        lines=lines,
        remarks=[],
        keys=[
            Key("kills", float(kills)),
            *(Key(n, float(c), at_most=0) for n, c in totals.items()),
        ],
        data={
            "seed": seed,
            "kinds": {
                name: {
                    "kills": tally.kills,
                    "series": tally.series,
                    "seconds": tally.seconds,
                    **tally.found,
                }
                for name, tally in tallies.items()
            },
        },
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=positive, default=ALL, metavar="N", help=f"default {ALL}")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="default 1")
    parser.add_argument("--only", nargs="+", choices=KINDS, metavar="KIND", default=list(KINDS))
    parser.add_argument(
        "--keep", action="store_true", help="keep folders in which there was a find"
    )
    add_json_argument(parser)
    add_limits(parser)
    arguments = parser.parse_args()
    arguments.check = True
    torch.set_num_threads(1)  # no thread of torch's may be left behind by a fork
    adopt_orphans(True)
    chosen = {name: kind for name, kind in KINDS.items() if name in arguments.only}
    share = arguments.kills / sum(kind.kills for kind in chosen.values())
    base = Path(tempfile.mkdtemp(prefix="flatout-kills-"))
    os.environ["OMP_NUM_THREADS"] = "1"
    tallies = {name: Tally() for name in chosen}

    def measure(name: str) -> Tally:
        kind, tally = chosen[name], tallies[name]
        kills = max(1, round(kind.kills * share))
        killed(kind, kills, arguments.seed, base, arguments.keep, tally)
        return tally

    each(chosen, measure)
    if not (arguments.keep and any(any(t.found.values()) for t in tallies.values())):
        shutil.rmtree(base, ignore_errors=True)
    return finish(results(tallies, arguments.seed), arguments)


if __name__ == "__main__":
    sys.exit(main())
