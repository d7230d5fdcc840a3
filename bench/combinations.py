"""Trains in many combinations of features, each compared with a plain loop.

    python bench/combinations.py                         # all pairs of values
    python bench/combinations.py --strength 3 --minutes 30
    python bench/combinations.py --only CASE             # one, as a line of a failure names it
    python bench/combinations.py --list > tests/combinations/pairs.txt   # after a change of axes

The cases are those of tests/combinations. Each that fails is printed as a line: its name, by which
`--only` runs it again, and what is wrong first.
"""

import argparse
import sys
import tempfile
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from combinations.axes import Case, cases
from combinations.known import cause_of
from combinations.run import found


def looked_at(case):
    """What is wrong with a case."""
    with tempfile.TemporaryDirectory() as folder:
        return found(case, Path(folder))


def told(case, lines):
    """Print what is wrong with a case; whether that is not known yet."""
    cause = cause_of(case)
    if lines:
        print(case, f"({cause})" if cause else "", lines[0].splitlines()[0], flush=True)
    return bool(lines) and cause is None


parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--strength", type=int, default=2, help="values that meet in a case")
parser.add_argument("--minutes", type=float, default=60, help="the longest time")
parser.add_argument("--only", metavar="CASE", help="this case alone, with all that is wrong")
parser.add_argument("--having", default="", help="cases that have these values, by commas")
parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
parser.add_argument("--list", action="store_true", help="name the cases, and run none")
given = parser.parse_args()
if given.list:
    print(*cases(given.strength), sep="\n")
    sys.exit()
if given.only:
    lines = looked_at(Case.parse(given.only))
    print(*(lines or ["right"]), sep="\n")
    sys.exit(bool(lines))
until = time.monotonic() + 60 * given.minutes
wanted = set(given.having.split(",")) - {""}
ran = failed = 0
running = deque()
with ThreadPoolExecutor(given.jobs) as pool:
    try:
        for case in cases(given.strength):
            if time.monotonic() > until:
                print(f"{given.minutes:g} minutes are over")
                break
            if not wanted <= set(map(str, case)):
                continue
            running.append((case, pool.submit(looked_at, case)))
            ran += 1
            if len(running) > given.jobs:
                first, result = running.popleft()
                failed += told(first, result.result())
    except KeyboardInterrupt:
        print("interrupted")
    failed += sum(told(case, result.result()) for case, result in running)
print(f"{ran} cases ran: {failed} are wrong, those with a known cause aside")
sys.exit(failed > 0)
