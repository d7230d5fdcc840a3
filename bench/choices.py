"""Whether `auto` chooses the same in fresh runs of the same job.

    python bench/choices.py [--runs 5] [--seconds 20] [--only mlp lstm] [--json [FILE]]

Each run is `Trainer.fit` with nothing set, in a process with an empty cache, as in
bench/breadth.py; it is planned for as many steps as the plain loop makes in `--seconds`. A setting
that any of the runs has chosen is chosen alike by the share of pairs of runs that agree on it.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import Any

from breadth import FAMILIES, run
from flatout.recipe import phrase
from restarts import each, tell
from results import Key, Results, add_json_argument, add_limits, finish, over_rows, positive

QUICK = ("mlp", "autoencoder", "lstm", "textcnn", "graph")


def measure(family: str, seconds: float, runs: int) -> dict[str, Any]:
    """What runs of a family have chosen."""
    plain_s = run(family, "fp32")["step_s"]
    steps = max(48, round(seconds / plain_s))
    fits = [run(family, "default", steps=steps) for _ in range(runs)]
    chosen = [one["chosen"] for one in fits]
    row = {
        "family": family,
        "plain_s": plain_s,
        "alike": alike(chosen),
        "chosen": chosen,
        "step_s": [one["last_s"] for one in fits],
        "trials": [list(map(trial_words, (one["tuning"] or {}).get("trials", ()))) for one in fits],
    }
    tell(f"{family}  {share(row):.2f}  {words(row)}")
    return row


def trial_words(trial: Mapping[str, Any]) -> str:
    """A trial in a line: what differs, the ratio with its interval, and what was taken."""
    a, b = trial["a"], trial["b"]
    tried = " · ".join(phrase(f, value) for f, value in b.items() if a.get(f) != value)
    ratio = "{ratio:.3f} [{low:.3f}, {high:.3f}] in {pairs}".format(**trial)
    return f"{tried}: {ratio}, {'taken' if trial['chosen'] == 'b' else 'left'}"


def alike(chosen: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """By setting that any run has chosen, the share of pairs of runs that agree on it."""
    fields = sorted({field for one in chosen for field in one})
    return {
        field: mean(
            float(a.get(field) == b.get(field)) for a, b in itertools.combinations(chosen, 2)
        )
        for field in fields
    }


def share(row: Mapping[str, Any]) -> float:
    """Of a family's settings, how many are chosen alike; of none, all."""
    return mean(row["alike"].values()) if row["alike"] else 1.0


def words(row: Mapping[str, Any]) -> str:
    """What was chosen, and by how many of the runs where not by all."""
    runs = len(row["chosen"])
    times = Counter((field, value) for one in row["chosen"] for field, value in one.items())
    parts = [
        phrase(field, value) + ("" if count == runs else f" ({count} of {runs})")
        for (field, value), count in sorted(times.items(), key=lambda item: (-item[1], item[0][0]))
    ]
    return " · ".join(parts) or "as plain PyTorch"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_json_argument(parser)
    add_limits(parser)
    parser.add_argument("--check", action="store_true", help="exit 1 if the key is not met")
    parser.add_argument("--runs", type=positive, default=5)
    parser.add_argument("--seconds", type=float, default=20.0, help="of the plain run")
    parser.add_argument("--only", nargs="*", choices=FAMILIES, default=QUICK)
    a = parser.parse_args()
    rows = each(a.only, lambda family: measure(family, a.seconds, a.runs))
    results = Results(
        title=f"{a.runs} runs of each, planned for {a.seconds:g} s of plain steps",
        headers=["family", "plain ms", "fastest .. slowest run", "alike", "chosen"],
        lines=[
            [
                row["family"],
                f"{1e3 * row['plain_s']:.1f}",
                f"{1e3 * min(row['step_s']):.1f} .. {1e3 * max(row['step_s']):.1f}",
                f"{share(row):.2f}",
                words(row),
            ]
            for row in rows
        ],
        remarks=["fastest .. slowest: ms of a step in the last third of a run"],
        keys=[
            Key("chosen_again", over_rows(median, rows, share), at_least=0.9),
            Key("chosen_again_worst", over_rows(min, rows, share)),
        ],
        data={"rows": rows},
    )
    return finish(results, a)


if __name__ == "__main__":
    sys.exit(main())
