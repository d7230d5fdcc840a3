"""Train in many combinations of features, and compare each with a plain loop.

    python bench/combinations.py                         # all pairs of values
    python bench/combinations.py --strength 3 --minutes 30
    python bench/combinations.py --only CASE             # one case, by its printed name
    python bench/combinations.py --list > tests/combinations/pairs.txt   # after a change of axes

The cases come from tests/combinations. Each failed case is printed in one line: its name, which
`--only` accepts, and its first fault.
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


def faults_of(case):
    with tempfile.TemporaryDirectory() as folder:
        return found(case, Path(folder))


def report(case, lines):
    """Print the first fault of a case, and return whether the case fails without a known cause."""
    cause = cause_of(case)
    if lines:
        print(case, f"({cause})" if cause else "", lines[0].splitlines()[0], flush=True)
    return bool(lines) and cause is None


parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--strength", type=int, default=2, help="number of axes to combine")
parser.add_argument("--minutes", type=float, default=60, help="the longest time")
parser.add_argument("--only", metavar="CASE", help="run this case alone, and print all its faults")
parser.add_argument("--having", default="", help="run cases with these values, separated by commas")
parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
parser.add_argument("--list", action="store_true", help="print the names of the cases alone")
given = parser.parse_args()
if given.list:
    print(*cases(given.strength), sep="\n")
    sys.exit()
if given.only:
    lines = faults_of(Case.parse(given.only))
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
            running.append((case, pool.submit(faults_of, case)))
            ran += 1
            if len(running) > given.jobs:
                first, result = running.popleft()
                failed += report(first, result.result())
    except KeyboardInterrupt:
        print("interrupted")
    failed += sum(report(case, result.result()) for case, result in running)
print(f"{ran} cases ran: {failed} failed without a known cause")
sys.exit(failed > 0)
