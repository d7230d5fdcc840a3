"""What `flatout doctor` finds in scripts whose pitfalls are known.

    python bench/doctor.py [--restarts 1] [--seconds 20] [--only NAME ...] [--json [FILE]]

Every script of `bench/corpus` is shown to the doctor's first look, and so is its twin, which lacks
the pitfall and nothing else. A script that shows several times must be named each time. A pitfall
that costs nothing here (`prescribe = false`) may be named, but not prescribed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from pitfalls import Pitfall, absence, read_index
from restarts import end_peers_on_sigterm
from results import Key, Results, add_arguments, finish, positive

FLATOUT = [sys.executable, "-c", "from flatout.cli.main import main; main()"]
# The clean script with the smallest steps of all, written as a plain loop.
RAW_LOOP = "bf16_useless"
# Beyond the seconds that it watches: imports, data, the end of the ranks.
GRACE_S = 180.0


@dataclass(frozen=True)
class Answer:
    """What the doctor said of one script.

    Args:
        findings: as its JSON has them.
        added_us_per_step: that it reports; None where it does not.
        reason: why there is no answer, or the error that the script ended with, or empty.
        is_one: whether the doctor said anything that can be read.
    """

    findings: Sequence[Mapping[str, Any]] = ()
    added_us_per_step: float | None = None
    reason: str = ""
    is_one: bool = True


@dataclass
class Seen:
    """All answers to a script and to its twin, one a restart.

    Args:
        pitfall: whose they are.
        reason: why it was not run, or empty.
    """

    pitfall: Pitfall
    reason: str
    script: Sequence[Answer] = ()
    twin: Sequence[Answer] = ()

    @property
    def is_named(self) -> bool:
        """Each time, and as a danger where it is one."""
        return bool(self.script) and all(map(self._naming, self.script))

    @property
    def is_located(self) -> bool:
        """Named each time, and with one of the marked lines."""
        return self.is_named and all(
            any(_line(one, self.pitfall.script) in self.pitfall.marked for one in naming)
            for naming in map(self._naming, self.script)
        )

    @property
    def is_named_in_twin(self) -> bool:
        return any(map(self._naming, self.twin))

    @property
    def false_dangers(self) -> list[Mapping[str, Any]]:
        return [
            one
            for answer in self.twin
            for one in answer.findings
            if one["kind"] == "danger" and one.get("number") not in self.pitfall.also
        ]

    @property
    def prescribed_wrongly(self) -> list[Mapping[str, Any]]:
        """What was proven of a clean twin, or of a script whose pitfall costs nothing."""
        wrong = [
            one
            for answer in self.twin
            for one in proven(answer)
            if one.get("number") not in self.pitfall.also
        ]
        if not self.pitfall.prescribe:
            numbers = self.pitfall.numbers
            wrong += [one for a in self.script for one in proven(a) if one.get("number") in numbers]
        return wrong

    def _naming(self, answer: Answer) -> list[Mapping[str, Any]]:
        return [
            one
            for one in answer.findings
            if one.get("number") in self.pitfall.numbers
            and (one["kind"] == "danger" or not self.pitfall.danger)
        ]


def proven(answer: Answer) -> list[Mapping[str, Any]]:
    return [one for one in answer.findings if one.get("proven")]


def _line(finding: Mapping[str, Any], script: Path) -> int | None:
    """The line of the script that a finding points at."""
    file, _, line = str(finding.get("where", "")).rpartition(":")
    if Path(file).name != script.name or not line.isdigit():
        return None
    return int(line)


# -- asking the doctor ---------------------------------------------------------------------------


def ask(script: Path, ranks: int, seconds: float) -> Answer:
    """Show the doctor a script, in an empty folder that is gone afterwards."""
    start = ["torchrun", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    options = ["doctor", "--json", "--seconds", str(seconds), "--"]
    with tempfile.TemporaryDirectory(prefix="flatout-bench-") as folder:
        doctor = subprocess.Popen(
            [*FLATOUT, *options, *start, str(script)],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            out, err = doctor.communicate(timeout=seconds + GRACE_S)
        except subprocess.TimeoutExpired:
            return Answer(reason=f"no answer in {seconds + GRACE_S:.0f} s", is_one=False)
        finally:
            if doctor.poll() is None:
                os.killpg(doctor.pid, signal.SIGKILL)
                doctor.wait()
    return answer_of(out, err, doctor.returncode)


def answer_of(out: str, err: str, code: int) -> Answer:
    """Read the doctor's JSON."""
    try:
        said = json.loads(out)
    except ValueError:
        words = err.strip().splitlines() or [f"exit code {code}"]
        return Answer(reason=words[-1].strip(), is_one=False)
    return Answer(
        findings=said["findings"],
        added_us_per_step=said.get("added_us_per_step"),
        reason=said.get("error", "").strip().split("\n")[-1],
    )


def ask_all(
    pitfalls: Iterable[Pitfall], *, restarts: int, seconds: float, only: Sequence[str]
) -> list[Seen]:
    rows = []
    for pitfall in pitfalls:
        left_out = "left out by --only" if only and pitfall.name not in only else ""
        seen = Seen(pitfall, absence(pitfall) or left_out)
        rows.append(seen)
        if seen.reason:
            continue
        ranks = pitfall.ranks
        seen.script = [ask(pitfall.script, ranks, seconds) for _ in range(restarts)]
        seen.twin = [ask(pitfall.twin, ranks, seconds) for _ in range(restarts)]
        tell(f"{pitfall.name}: {words_of(seen)}")
    return rows


# -- the verdict ---------------------------------------------------------------------------------


def keys_of(rows: Sequence[Seen]) -> list[Key]:
    ran = [seen for seen in rows if not seen.reason]
    to_name = [seen for seen in ran if seen.pitfall.must_be_named]
    dangers = [seen for seen in ran if seen.pitfall.danger]
    named = [seen for seen in to_name if seen.is_named]
    answers = [answer for seen in ran for answer in (*seen.script, *seen.twin)]
    wrong = [one for seen in ran for one in seen.prescribed_wrongly]
    any_proof = any(proven(answer) for answer in answers)
    silent = sum(not answer.is_one for answer in answers)
    false_dangers: float | str = sum(len(seen.false_dangers) for seen in ran)
    if silent or not ran:
        false_dangers = f"{silent} looks without an answer" if silent else "nothing was run"
    raw = [answer for seen in ran if seen.pitfall.name == RAW_LOOP for answer in seen.twin]
    counted = [a.added_us_per_step for a in raw if a.added_us_per_step is not None]
    return [
        Key("recall", _share(seen.is_named for seen in to_name), at_least=0.95),
        Key("danger_recall", _share(seen.is_named for seen in dangers), at_least=1.0),
        Key("false_prescriptions", len(wrong) if any_proof else "no trial was run", at_most=0),
        Key("false_dangers", false_dangers, at_most=0),
        Key(
            "added_us_per_step",
            median(counted) if counted else f"nothing counted in {RAW_LOOP}",
            at_most=5,
        ),
        Key("trial_error", "no trial was run", at_most=0.05),
        Key("located", _share(seen.is_located for seen in named), note="of those named"),
        Key("named_in_twins", sum(seen.is_named_in_twin for seen in ran), note="unproven"),
        Key("pitfalls", len(ran), note=f"{len(rows) - len(ran)} not run"),
    ]


def _share(found: Iterable[bool]) -> float | str:
    outcomes = list(found)
    return sum(outcomes) / len(outcomes) if outcomes else "nothing was run"


def words_of(seen: Seen) -> str:
    """What to say of a row."""
    if seen.reason:
        return seen.reason
    words = []
    if seen.pitfall.must_be_named and not seen.is_named:
        words.append("MISSED")
    elif seen.is_named:
        words.append("named" if seen.is_located else "named, at another line")
    else:
        words.append("left alone")
    if seen.is_named_in_twin:
        words.append("named in the twin too")
    words += sorted({f"false danger: {one['name']}" for one in seen.false_dangers})
    words += sorted({f"wrongly prescribed: {one['name']}" for one in seen.prescribed_wrongly})
    words += sorted({a.reason for a in (*seen.script, *seen.twin) if a.reason})
    return "; ".join(words)


def line_of(seen: Seen) -> list[str]:
    pitfall = seen.pitfall
    numbers = ", ".join(map(str, pitfall.numbers))
    kind = "danger" if pitfall.danger else "slow" if pitfall.prescribe else "costs no time"
    added = [a.added_us_per_step for a in (*seen.script, *seen.twin) if a.added_us_per_step]
    cost = f"{median(added):.1f}" if added else ""
    return [pitfall.name, numbers, kind, cost, words_of(seen)]


def as_data(seen: Seen) -> dict[str, Any]:
    return {
        "name": seen.pitfall.name,
        "numbers": seen.pitfall.numbers,
        "reason": seen.reason,
        "named": seen.is_named if seen.script else None,
        "located": seen.is_located if seen.script else None,
        "named_in_twin": seen.is_named_in_twin if seen.twin else None,
        "script": [vars(answer) for answer in seen.script],
        "twin": [vars(answer) for answer in seen.twin],
    }


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def read_arguments(names: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, restarts=1)
    parser.add_argument(
        "--seconds", type=positive, default=20, help="that a script is watched, default 20"
    )
    parser.add_argument("--only", nargs="+", default=(), choices=names, metavar="NAME")
    return parser.parse_args()


def main() -> int:
    pitfalls = read_index()
    arguments = read_arguments([pitfall.name for pitfall in pitfalls])
    end_peers_on_sigterm()
    rows = ask_all(
        pitfalls,
        restarts=arguments.restarts,
        seconds=arguments.seconds,
        only=arguments.only,
    )
    results = Results(
        title=f"The doctor's first look at {len(pitfalls)} scripts and their clean twins; "
        f"{arguments.restarts} of each, watched for {arguments.seconds} s",
        headers=["", "pitfall", "kind", "us added a step", ""],
        lines=[line_of(seen) for seen in rows],
        remarks=[],
        keys=keys_of(rows),
        data={"rows": [as_data(seen) for seen in rows]},
    )
    return finish(results, arguments)


if __name__ == "__main__":
    sys.exit(main())
