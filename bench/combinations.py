"""Train in many combinations of features, and compare each with a plain loop.

    python bench/combinations.py                         # all pairs of values
    python bench/combinations.py --strength 3 --minutes 30
    python bench/combinations.py --only CASE             # one case, by its printed name
    python bench/combinations.py --list > tests/combinations/pairs.txt   # after a change of axes

The cases come from tests/combinations. Each failed case is printed in one line: its name, which
`--only` accepts, and its first fault.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from combinations.axes import Case, cases
from combinations.run import found
from restarts import PROGRESS, each, tell
from results import Key, Results, add_json_argument, add_limits, finish, positive


def faults_of(case: Case) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        return list(found(case, Path(folder)))


@dataclass(frozen=True)
class Unit:
    """A case whose process has been started."""

    case: Case
    faults: Future[list[str]]

    def __str__(self) -> str:
        return str(self.case)


def ahead(
    chosen: Iterable[Case], jobs: int, start: Callable[[Case], Future[list[str]]]
) -> Iterator[Unit]:
    """Yield cases in order, and start `jobs` further cases before waiting for each."""
    running: deque[Unit] = deque()
    for case in chosen:
        running.append(Unit(case, start(case)))
        if len(running) > jobs:
            yield running.popleft()
    yield from running


def row_of(case: Case, faults: list[str]) -> list[str]:
    """Print the first fault of a case, and return it with the name of the case."""
    row = [str(case), faults[0].splitlines()[0] if faults else ""]
    if faults:
        tell("  ".join(row))
    return row


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strength", type=int, default=2, help="number of axes to combine")
    parser.add_argument("--only", metavar="CASE", help="run this case alone, print all its faults")
    parser.add_argument("--having", default="", help="run cases with these values, as A,B,...")
    parser.add_argument("--jobs", type=positive, default=2, help="cases at a time")
    parser.add_argument("--list", action="store_true", help="print the names of the cases alone")
    add_json_argument(parser)
    add_limits(parser, minutes=60)
    parser.set_defaults(check=True)
    return parser.parse_args()


def main() -> int:
    given = read_arguments()
    if given.list:
        print(*cases(given.strength), sep="\n")
        return 0
    if given.only:
        lines = faults_of(Case.parse(given.only))
        print(*(lines or ["right"]), sep="\n")
        return int(bool(lines))
    wanted = set(given.having.split(",")) - {""}
    chosen = (case for case in cases(given.strength) if wanted <= set(map(str, case)))
    pool = ThreadPoolExecutor(given.jobs)
    rows = each(
        ahead(chosen, given.jobs, lambda case: pool.submit(faults_of, case)),
        lambda unit: row_of(unit.case, unit.faults.result()),
    )
    pool.shutdown(cancel_futures=True)
    bad = [row for row in rows if row[1]]
    results = Results(
        title=f"Cases with faults, of {len(rows)} that ran",
        headers=["case", "first fault"],
        lines=bad,
        remarks=[],
        keys=[
            Key("cases", float(len(rows))),
            Key("failed", float(len(bad)) if rows else PROGRESS.reason, at_most=0),
        ],
        data={},
    )
    return finish(results, given)


if __name__ == "__main__":
    sys.exit(main())
