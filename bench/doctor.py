"""What `flatout doctor` finds in scripts whose pitfalls are known.

    python bench/doctor.py [--budget 120] [--restarts 1] [--seconds 20] [--only NAME ...]
        [--run-s 0] [--remeasure 8] [--busy 0] [--keep FOLDER] [--shard K/N] [--json [FILE]]

Every script of `bench/corpus` is shown to the doctor, and so is the clean one, which lacks the
pitfall and nothing else. A script that shows several times must be named each time. With a budget
the doctor proves cures, and what it promises of a step for all cures together is measured again, by
whole runs (remeasure.py). For a clean script, and for a pitfall that costs nothing here
(`prescribe = false`), it must prescribe nothing but what makes whole runs faster on this machine,
as bf16 does on some. `--budget 0` asks for the first look only. The scripts are short, and a trial
must start one that ends again and again. `--run-s` gives each as many epochs as take so long, since
users try longer ones: so does the run by which what was promised is measured again.
`--busy N` shows it the clean scripts alone, beside N processes that compute in bursts: there, too,
it must prescribe nothing else. What it prescribes there is measured again when they are gone.

All trials take hours: `--keep` leaves each row in a folder and takes it from there the next time,
and `--shard` does a part of the rows. A last call with `--keep` alone sums up what all have kept.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from flatout.report.first_look import MOST_LINES
from load import beside_load
from pitfalls import Pitfall, absence, read_index
from remeasure import (
    FLATOUT,
    NotMeasured,
    Remeasured,
    as_it_is,
    epochs_within,
    remeasure,
)
from restarts import PROGRESS, each, run_to_end, tell
from results import Key, Results, add_arguments, finish, positive
from screens import WIDTHS, lines_on_screens

# The clean script with the smallest steps of all, written as a plain loop.
RAW_LOOP = "bf16_useless"
# Beyond the seconds that it watches and tries: imports, data, the end of the ranks.
GRACE_S = 180.0
# Checks of what a script does wrong or for nothing without a word, beside the dangers.
SILENT = {
    "called_twice", "checkpointing_needless", "collectives_each_step", "history_grows",
    "optimizer_extreme", "recurrent_by_step", "saved_each_step",
}  # fmt: skip
# Shorter steps may pay 5 us for being watched, whatever share of them that is.
SHORT_MS = 0.5


@dataclass(frozen=True)
class Asked:
    """How the doctor is asked.

    Args:
        restarts: how often for each script.
        seconds: that a script is watched.
        budget: seconds for its trials; 0 for none.
        remeasure: seconds that the measured epochs of whole runs take; 0 for none.
        run_s: seconds that a run of the script takes; 0 for the epochs that it has by itself.
        busy: processes beside which the clean scripts alone are shown; 0 to show all without.
    """

    restarts: int = 1
    seconds: float = 20
    budget: float = 120
    remeasure: float = 8
    run_s: float = 0
    busy: int = 0


@dataclass(frozen=True)
class Answer:
    """What the doctor said of one script.

    Args:
        findings: as its JSON has them.
        prescription: likewise; None where nothing was tried.
        added_us_per_step: that it reports; None where it does not.
        reason: why there is no answer, or the error that the script ended with, or empty.
        is_one: whether the doctor said anything that can be read.
        explained: share of the step time that a line or a module is known for.
        step_ms: of the rank that paid most for being watched, at the median.
        lines: that the first look takes on a screen of 80 or of 100 columns, where it takes more.
        look_s: that the first look took, from the end of the first step of the rank that came to it
            last.
        again: what whole runs with all that is prescribed have said.
    """

    findings: Sequence[Mapping[str, Any]] = ()
    added_us_per_step: float | None = None
    reason: str = ""
    is_one: bool = True
    prescription: Mapping[str, Any] | None = None
    explained: float | None = None
    step_ms: float | None = None
    lines: int | None = None
    look_s: float | None = None
    again: Remeasured | None = None

    @property
    def added_share(self) -> float | None:
        """Of a step; None of short ones."""
        if self.step_ms is None or self.added_us_per_step is None or self.step_ms < SHORT_MS:
            return None
        return self.added_us_per_step / 1e3 / self.step_ms

    @property
    def is_tried(self) -> bool:
        """Whether any cure was."""
        proofs = self.prescription["proofs"] if self.prescription else ()
        return any(proof["trial"] for proof in proofs)

    @property
    def prescribed(self) -> list[str]:
        """The findings whose cures are prescribed, by name."""
        if self.prescription is None:
            return []
        proofs = [one for one in self.prescription["proofs"] if one["outcome"] == "prescribed"]
        together = self.prescription["together"]
        cures = (*proofs, *([together] if together else ()))
        return list(dict.fromkeys(name for cure in cures for name in cure["names"]))

    @property
    def together(self) -> Mapping[str, Any] | None:
        """All that is prescribed at once, where it was tried so."""
        together = self.prescription["together"] if self.prescription else None
        return together if together and together["trial"] else None

    @property
    def predicted(self) -> float | None:
        """What the doctor promises of all cures together: of a step with its share of evaluation
        and saving, as whole runs are measured from epoch to epoch."""
        if self.together is None or self.prescription is None:
            return None
        before, after = (self.prescription.get(f"step_{end}_s") for end in ("before", "after"))
        return float(before / after) if before and after else float(self.together["trial"]["ratio"])

    @property
    def trial_error(self) -> float | None:
        """How far from 1 predicted over measured again is."""
        again = self.again.ratio if self.again else None
        return abs(self.predicted / again - 1) if self.predicted and again else None

    @property
    def holds(self) -> bool:
        """Whether whole runs are faster with what is prescribed."""
        return bool(self.again and self.again.low and self.again.low > 1)


@dataclass
class Seen:
    """All answers to a script and to the clean one, one a restart.

    Args:
        pitfall: whose they are.
        reason: why it was not run, or empty.
    """

    pitfall: Pitfall
    reason: str
    script: Sequence[Answer] = ()
    clean: Sequence[Answer] = ()
    busy: Sequence[Answer] = ()

    @property
    def answers(self) -> tuple[Answer, ...]:
        """All of them."""
        return (*self.script, *self.clean, *self.busy)

    @property
    def is_answered(self) -> bool:
        """Whether there is an answer each time."""
        return bool(self.answers) and all(one.is_one for one in self.answers)

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
    def is_named_in_clean(self) -> bool:
        return any(map(self._naming, self.clean))

    @property
    def false_dangers(self) -> list[Mapping[str, Any]]:
        return [
            one
            for answer in self.clean
            for one in answer.findings
            if one["kind"] == "danger" and one["name"] not in self.pitfall.also
        ]

    @property
    def prescribed_wrongly(self) -> list[str]:
        """What is prescribed for a clean script, or for a script whose pitfall costs nothing, and
        makes whole runs no faster."""
        answers = [*self.clean, *(() if self.pitfall.prescribe else self.script)]
        return self._others_than_known(answers)

    @property
    def prescribed_wrongly_busy(self) -> list[str]:
        """What is prescribed for a clean script beside other work."""
        return self._others_than_known(self.busy)

    def _others_than_known(self, answers: Iterable[Answer]) -> list[str]:
        return [
            name
            for answer in answers
            for name in answer.prescribed
            if name not in self.pitfall.also and not answer.holds
        ]

    def _naming(self, answer: Answer) -> list[Mapping[str, Any]]:
        return [
            one
            for one in answer.findings
            if one["name"] in self.pitfall.checks
            and (one["kind"] == "danger" or not self.pitfall.danger)
        ]


def _line(finding: Mapping[str, Any], script: Path) -> int | None:
    """The line of the script that a finding points at."""
    file, _, line = str(finding.get("where", "")).rpartition(":")
    if Path(file).name != script.name or not line.isdigit():
        return None
    return int(line)


# -- asking the doctor ---------------------------------------------------------------------------


def ask(script: Path, ranks: int, asked: Asked, *options_of_script: str) -> Answer:
    """Show the doctor a script, in an empty folder that is gone afterwards."""
    start = ["torchrun", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    trials = ["--yes", "--budget", f"{asked.budget:g}s"] if asked.budget else []
    options = ["doctor", "--json", "--seconds", f"{asked.seconds:g}", *trials, "--"]
    most = asked.seconds + asked.budget + GRACE_S
    with tempfile.TemporaryDirectory(prefix="flatout-bench-") as folder:
        out, err, code = run_to_end(
            [*FLATOUT, *options, *start, str(script), *options_of_script], folder, most
        )
    if code is None:
        return Answer(reason=f"no answer in {most:.0f} s", is_one=False)
    return answer_of(out, err, code)


def _epochs(script: Path, ranks: int, run_s: float) -> list[str]:
    """The option that makes a run of a script take so many seconds, by what an epoch takes."""
    with tempfile.TemporaryDirectory(prefix="flatout-bench-") as folder:
        try:
            run = as_it_is(script, Path(folder, "script"), ranks)
            return ["--epochs", str(epochs_within(run, run_s))]
        except NotMeasured:
            return []  # it tells of no epochs


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
        prescription=said.get("prescription"),
        explained=said.get("explained"),
        step_ms=_step_ms(said),
        lines=max(lines_on_screens(said)) if said.get("observations") else None,
        look_s=_look_s(said),
    )


def _step_ms(said: Mapping[str, Any]) -> float | None:
    for rank in said.get("observations", ()):
        if rank["step_ms"] and rank["added_us_per_step"] == said.get("added_us_per_step"):
            return median(rank["step_ms"])
    return None


def _look_s(said: Mapping[str, Any]) -> float | None:
    starts = [rank.get("start_s") for rank in said.get("observations", ())]
    known = [seconds for seconds in starts if seconds is not None]
    return said["seconds"] - max(known) if known else None


def ask_all(
    pitfalls: Sequence[Pitfall],
    asked: Asked,
    *,
    only: Sequence[str] = (),
    shard: tuple[int, int] = (1, 1),
    keep: Path | None = None,
) -> list[Seen]:
    """Ask about each script and the clean one, but for those that are kept already.

    Args:
        pitfalls: the rows.
        asked: how.
        only: names of the rows to ask about; none means all.
        shard: (k, n) asks about the k-th of every n rows.
        keep: a folder for what was answered.
    """
    rows = [Seen(pitfall, absence(pitfall)) for pitfall in pitfalls]

    def ask_about(place: int) -> Seen:
        seen = rows[place]
        name = seen.pitfall.name
        file = keep / f"{name}.json" if keep else None
        if seen.reason or (file and take_kept(file, seen, asked)):
            return seen
        if only and name not in only:
            seen.reason = "left out by --only"
        elif place % shard[1] != shard[0] - 1:
            seen.reason = "left out by --shard"
        else:
            ask_one(seen, asked)
            if file:
                file.write_text(json.dumps({"asked": asdict(asked), **as_data(seen)}))
            tell(f"{name}: {words_of(seen)}")
        return seen

    each(range(len(rows)), ask_about)
    for seen in rows:
        seen.reason = seen.reason or ("" if seen.answers else PROGRESS.reason)
    return rows


def ask_one(seen: Seen, asked: Asked) -> None:
    pitfall = seen.pitfall
    with tempfile.TemporaryDirectory(prefix="flatout-bench-clean-") as folder:
        clean = pitfall.write_clean(Path(folder))
        if asked.busy:
            seen.busy = _asked(clean, pitfall, asked)
        else:
            seen.script = _asked(pitfall.script, pitfall, asked)
            seen.clean = _asked(clean, pitfall, asked)


def _asked(script: Path, pitfall: Pitfall, asked: Asked) -> list[Answer]:
    answers = []
    epochs = _epochs(script, pitfall.ranks, asked.run_s) if asked.run_s else []
    for _ in range(asked.restarts):
        with beside_load(asked.busy):
            answer = ask(script, pitfall.ranks, asked, *epochs)
        answers.append(_again(answer, script, pitfall, asked))  # at once: a machine drifts
    return answers


def _again(answer: Answer, script: Path, pitfall: Pitfall, asked: Asked) -> Answer:
    if answer.together is None or not asked.remeasure:
        return answer
    cures, seconds = answer.together, asked.remeasure
    return replace(answer, again=remeasure(script, pitfall.ranks, cures, seconds=seconds))


def take_kept(file: Path, seen: Seen, asked: Asked) -> bool:
    """Fill a row with what was kept of it, if it was asked for in the same way and answered."""
    if not file.exists():
        return False
    kept = json.loads(file.read_text())
    if kept["asked"] != asdict(asked):
        return False
    seen.script, seen.clean, seen.busy = (
        [Answer(**{**one, "again": _remeasured(one)}) for one in kept.get(kind, ())]
        for kind in ("script", "clean", "busy")
    )
    return seen.is_answered


def _remeasured(answer: Mapping[str, Any]) -> Remeasured | None:
    return Remeasured(**answer["again"]) if answer.get("again") else None


# -- the verdict ---------------------------------------------------------------------------------


def keys_of(rows: Sequence[Seen]) -> list[Key]:
    ran = [seen for seen in rows if not seen.reason]
    to_name = [seen for seen in ran if seen.pitfall.must_be_named]
    dangers = [seen for seen in ran if seen.pitfall.danger]
    silent_ones = [s for s in ran if s.pitfall.danger or SILENT & {*s.pitfall.checks}]
    named = [seen for seen in to_name if seen.is_named]
    answers = [answer for seen in ran for answer in seen.answers]
    wrong: float | str = sum(len(seen.prescribed_wrongly) for seen in ran)
    tried = sum(answer.is_tried for answer in answers)
    errors = [error for answer in answers if (error := answer.trial_error) is not None]
    silent = sum(not answer.is_one for answer in answers)
    false_dangers: float | str = sum(len(seen.false_dangers) for seen in ran)
    if silent or not ran:
        false_dangers = f"{silent} looks without an answer" if silent else "nothing was run"
    if silent or not tried:
        wrong = f"{silent} looks without an answer" if silent else "no trial was run"
    raw = [answer for seen in ran if seen.pitfall.name == RAW_LOOP for answer in seen.clean]
    counted = [a.added_us_per_step for a in raw if a.added_us_per_step is not None]
    return [
        Key("recall", _share(seen.is_named for seen in to_name), at_least=0.95),
        Key("danger_recall", _share(seen.is_named for seen in dangers), at_least=1.0),
        Key("silent_recall", _share(seen.is_named for seen in silent_ones), at_least=0.95),
        Key("false_prescriptions", wrong, at_most=0, note=f"{tried} of {len(answers)} looks tried"),
        Key("false_dangers", false_dangers, at_most=0),
        Key(
            "added_us_per_step",
            median(counted) if counted else f"nothing counted in {RAW_LOOP}",
            at_most=5,
        ),
        Key(
            "trial_error",
            median(errors) if errors else "nothing prescribed was measured again",
            at_most=0.05,
            note=f"of {len(errors)} scripts",
        ),
        *_wide_errors(errors),
        *_keys_of_looks(ran),
        Key("located", _share(seen.is_located for seen in named), note="of those named"),
        Key("named_in_clean", sum(seen.is_named_in_clean for seen in ran), note="unproven"),
        Key("pitfalls", len(ran), note=f"{len(rows) - len(ran)} not run"),
    ]


def _keys_of_looks(rows: Sequence[Seen]) -> list[Key]:
    """What first looks say of themselves and take, over all scripts: in the middle and at worst."""
    looks = [
        (f"{seen.pitfall.name}{kind}", answer)
        for seen in rows
        for kind, answers in (("", seen.script), (", clean", seen.clean))
        for answer in answers
    ]
    explained = [(one.explained, name) for name, one in looks if one.explained is not None]
    added = [(share, name) for name, one in looks if (share := one.added_share) is not None]
    lines = [(one.lines, name) for name, one in looks if one.lines is not None]
    seconds = [(one.look_s, name) for name, one in looks if one.look_s is not None]
    keys = []
    if explained:
        middle = median(share for share, _ in explained)
        least, name = min(explained)
        keys += [
            Key("explained", middle, at_least=0.9, note=f"of {len(explained)} looks"),
            Key("explained_least", least, at_least=0.75, note=name),
        ]
    if added:
        most, name = max(added)
        note = f"{name}; of steps of {SHORT_MS} ms and more"
        keys.append(Key("added_share_most", most, at_most=0.01, note=note))
    if lines:
        longest, name = max(lines)
        columns = " and ".join(map(str, WIDTHS))
        note = f"{name}; at {columns} columns"
        keys.append(Key("lines_on_screen", longest, at_most=MOST_LINES, note=note))
    if seconds:
        slowest, name = max(seconds)
        note = f"{name}; from the end of its first step"
        keys.append(Key("first_look_s", slowest, at_most=30, note=note))
    return keys


def _wide_errors(errors: Sequence[float]) -> list[Key]:
    """How far off promises are at the 90th percentile, where there are enough to have one."""
    if len(errors) < 10:
        return []
    return [Key("trial_error_90", quantiles(errors, n=10)[-1], at_most=0.15)]


def busy_keys_of(rows: Sequence[Seen]) -> list[Key]:
    """What was prescribed for clean scripts beside other work."""
    ran = [seen for seen in rows if not seen.reason]
    answers = [answer for seen in ran for answer in seen.answers]
    tried = sum(answer.is_tried for answer in answers)
    silent = sum(not answer.is_one for answer in answers)
    wrong: float | str = sum(len(seen.prescribed_wrongly_busy) for seen in ran)
    note = f"{tried} of {len(answers)} looks tried"
    if silent or not tried:
        wrong = f"{silent} looks without an answer" if silent else "no trial was run"
    return [
        Key("false_prescriptions_busy", wrong, at_most=0, note=note),
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
    if seen.busy:
        words.append("prescribed " + (", ".join(seen.busy[0].prescribed) or "nothing"))
    elif seen.pitfall.must_be_named and not seen.is_named:
        words.append("MISSED")
    elif seen.is_named:
        words.append("named" if seen.is_located else "named, at another line")
    else:
        words.append("left alone")
    if seen.is_named_in_clean:
        words.append("named in the clean script too")
    words += sorted({f"false danger: {one['name']}" for one in seen.false_dangers})
    words += sorted({f"wrongly prescribed: {name}" for name in seen.prescribed_wrongly})
    wrong = seen.prescribed_wrongly_busy
    words += sorted({f"wrongly prescribed beside other work: {name}" for name in wrong})
    words += _words_of_trial(seen)
    words += sorted({answer.reason for answer in seen.answers if answer.reason})
    return "; ".join(words)


def _words_of_trial(seen: Seen) -> list[str]:
    promising = [answer for answer in seen.answers if answer.predicted]
    if not promising:
        stopped = [a.prescription["stopped"] for a in (*seen.script, *seen.busy) if a.prescription]
        return sorted({f"no trial: {reason}" for reason in stopped if reason})
    return [_promise(answer, answer not in seen.script) for answer in promising]


def _promise(answer: Answer, is_clean: bool) -> str:
    again = answer.again or Remeasured(reason="not asked for")
    then = f"not measured ({again.reason})"
    if again.ratio:
        within = f" ({again.low:.2f} to {again.high:.2f})" if again.low and again.high else ""
        then = f"{again.ratio:.2f}x{within}"
    names = f"clean, {', '.join(answer.prescribed)}: " if is_clean else ""
    return f"{names}promised {answer.predicted:.2f}x, again {then}"


def line_of(seen: Seen) -> list[str]:
    pitfall = seen.pitfall
    kind = "danger" if pitfall.danger else "slow" if pitfall.prescribe else "costs no time"
    added = [answer.added_us_per_step for answer in seen.answers if answer.added_us_per_step]
    cost = f"{median(added):.1f}" if added else ""
    return [pitfall.name, kind, cost, words_of(seen)]


def as_data(seen: Seen) -> dict[str, Any]:
    return {
        "name": seen.pitfall.name,
        "reason": seen.reason,
        "named": seen.is_named if seen.script else None,
        "located": seen.is_located if seen.script else None,
        "named_in_clean": seen.is_named_in_clean if seen.clean else None,
        "script": [asdict(answer) for answer in seen.script],
        "clean": [asdict(answer) for answer in seen.clean],
        "busy": [asdict(answer) for answer in seen.busy],
    }


def read_arguments(names: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, restarts=1)
    parser.add_argument(
        "--seconds", type=positive, default=20, help="that a script is watched, default 20"
    )
    parser.add_argument("--only", nargs="+", default=(), choices=names, metavar="NAME")
    parser.add_argument(
        "--budget", type=float, default=120, help="seconds for trials, default 120; 0 for none"
    )
    parser.add_argument(
        "--remeasure", type=float, default=8, help="seconds of the whole runs, default 8; 0: none"
    )
    parser.add_argument(
        "--run-s", type=float, default=0, help="seconds of a run, default the script's own epochs"
    )
    parser.add_argument(
        "--busy", type=int, default=0, help="processes of other work, beside clean scripts alone"
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="for answers; made if absent")
    parser.add_argument("--shard", type=shard_of, default=(1, 1), metavar="K/N")
    return parser.parse_args()


def shard_of(text: str) -> tuple[int, int]:
    """Reads K/N: the K-th of N parts, from 1."""
    part, _, parts = text.partition("/")
    if not (part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text!r} is not K/N with K from 1 to N")
    return int(part), int(parts)


def main() -> int:
    pitfalls = read_index()
    arguments = read_arguments([pitfall.name for pitfall in pitfalls])
    asked = Asked(
        arguments.restarts,
        arguments.seconds,
        arguments.budget,
        arguments.remeasure,
        arguments.run_s,
        arguments.busy,
    )
    if arguments.keep:
        arguments.keep.mkdir(parents=True, exist_ok=True)
    rows = ask_all(pitfalls, asked, only=arguments.only, shard=arguments.shard, keep=arguments.keep)
    trials = f"trials of {asked.budget:g} s" if asked.budget else "the first look only"
    beside = f", beside {asked.busy} processes" if asked.busy else ""
    results = Results(
        title=f"The doctor on {len(pitfalls)} scripts with and without their pitfall; "
        f"{asked.restarts} of each, watched for {asked.seconds:g} s, {trials}{beside}",
        headers=["", "kind", "us added a step", ""],
        lines=[line_of(seen) for seen in rows],
        remarks=[],
        keys=busy_keys_of(rows) if asked.busy else keys_of(rows),
        data={"rows": [as_data(seen) for seen in rows]},
    )
    return finish(results, arguments)


if __name__ == "__main__":
    sys.exit(main())
