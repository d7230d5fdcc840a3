"""What `flatout doctor` promises for scripts on a GPU, and what whole runs of them then gain.

    python bench/doctor_gpu.py [--only NAME ...] [--seconds 3] [--budget 45] [--run-seconds 3]
        [--json [FILE]]

Each script of `bench/corpus_gpu` is shown to the doctor, which proves its cures. Then the script is
run twice to its end, as it is and with all that was prescribed, each for so many epochs that they
take the seconds of `--run-seconds` as it is. The first two epochs, in which kernels are loaded and
caches fill, are in no figure.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from remeasure import BEFORE, FEWEST, FLATOUT, NotMeasured, as_it_is, cured, epoch_s
from restarts import each, run_to_end, tell
from results import Key, Results, add_json_argument, add_limits, figure, finish

SCRIPTS = Path(__file__).with_name("corpus_gpu")
# Which findings are expected of each, one at least.
EXPECTED = {
    "fp32_convnet": ("fp32_slow", "tf32_off", "channels_first", "cudnn_benchmark"),
    "input_slow": ("workers_zero", "starvation", "map_per_sample"),
    "item_each_step": ("item_each_step", "tf32_off", "fp32_slow", "optimizer_unfused"),
}
# Steps of an epoch of each.
STEPS = {"fp32_convnet": 16, "input_slow": 100, "item_each_step": 64}
GRACE_S = 90.0


@dataclass
class Told:
    """What the doctor said of one script, and what whole runs said then.

    Args:
        name: the script's.
        device: on which it was seen to compute.
        limit: what holds it back, in the doctor's words.
        named: which of the expected findings it told.
        prescribed: in its words.
        promised, gained: times as fast; None where there is none.
        seconds: that the doctor took.
        reason: why something is missing.
    """

    name: str
    device: str = ""
    limit: str = ""
    named: Sequence[str] = ()
    prescribed: str = ""
    promised: float | None = None
    gained: float | None = None
    seconds: float = 0.0
    reason: str = ""

    @property
    def error(self) -> float | None:
        return abs(self.promised / self.gained - 1) if self.promised and self.gained else None


def visit(name: str, asked: argparse.Namespace) -> Told:
    """Show the doctor a script, and run it to its end without and with what it prescribes."""
    script = SCRIPTS / f"{name}.py"
    options = ["--seconds", f"{asked.seconds:g}", "--budget", f"{asked.budget:g}s"]
    command = [*FLATOUT, "doctor", "--json", "--yes", "--allow", "redrawn", *options]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="flatout-bench-") as folder:
        most = asked.seconds + asked.budget + GRACE_S
        out, err, code = run_to_end([*command, str(script), "--epochs", "10000"], folder, most)
        told = Told(name, seconds=time.monotonic() - began)
        try:
            said = json.loads(out)
        except ValueError:
            told.reason = (err.strip().splitlines() or [f"exit code {code}"])[-1]
            return told
        fill(told, said)
        together = (said.get("prescription") or {}).get("together")
        if together and together["trial"]:
            told.prescribed = together["words"]
            told.promised = together["trial"]["ratio"]
            try:
                epochs = BEFORE + max(FEWEST, ceil(asked.run_seconds / epoch_of(name, said)))
                told.gained = whole_runs(script, Path(folder), together, epochs)
            except NotMeasured as error:
                told.reason = str(error)
    tell("  ".join(line_of(told)))
    return told


def fill(told: Told, said: Mapping[str, Any]) -> None:
    """Fills in what the doctor's JSON holds."""
    told.device = said["observations"][0]["device"] if said["observations"] else ""
    told.limit = (said["critical"] or {}).get("words", "")
    names = {one["name"] for one in said["findings"] if one["kind"] == "slow"}
    told.named = sorted(names & {*EXPECTED[told.name]})
    prescription = said.get("prescription") or {}
    outcomes = [f"{p['words']}: {p['outcome']}" for p in prescription.get("proofs", ())]
    told.reason = prescription.get("stopped") or "" if prescription.get("together") else (
        prescription.get("stopped") or "; ".join(outcomes) or "nothing to prove"
    )  # fmt: skip


def epoch_of(name: str, said: Mapping[str, Any]) -> float:
    """Seconds of an epoch, as the steps of the first look were."""
    step_ms = sum(ms or 0.0 for ms in said["observations"][0]["lanes_ms"].values())
    return max(STEPS[name] * step_ms / 1e3, 1e-3)


def whole_runs(script: Path, folder: Path, cures: Mapping[str, Any], epochs: int) -> float:
    """Times as fast an epoch is with the cures, in a run each."""
    a, b = as_it_is(script, folder / "as_it_is"), cured(script, folder / "cured", cures)
    return epoch_s(a(epochs)) / epoch_s(b(epochs))


def keys_of(rows: Sequence[Told]) -> list[Key]:
    errors = [row.error for row in rows if row.error is not None]
    worst: float | str = max(errors) if errors else "nothing prescribed was run to its end"
    named = figure(lambda: sum(bool(row.named) for row in rows) / len(rows))
    return [
        Key("recall", named, at_least=1.0, note=f"of {len(rows)} scripts"),
        Key("trial_error_worst", worst, at_most=0.15, note=f"of {len(errors)} scripts"),
    ]


def line_of(row: Told) -> list[str]:
    figures = [f"{x:.2f}" if x else "" for x in (row.promised, row.gained)]
    words = "; ".join(filter(None, (row.limit, row.prescribed, row.reason)))
    return [row.name, *figures, f"{row.seconds:.0f}", words]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=EXPECTED, default=list(EXPECTED))
    parser.add_argument("--seconds", type=float, default=3.0, help="that a script is watched")
    parser.add_argument("--budget", type=float, default=45.0, help="seconds for its trials")
    parser.add_argument("--run-seconds", type=float, default=3.0, help="of a whole run as it is")
    add_json_argument(parser)
    add_limits(parser)
    parser.add_argument("--check", action="store_true", help="exit 1 if a key is not met")
    arguments = parser.parse_args()
    rows = each(arguments.only, lambda name: visit(name, arguments))
    results = Results(
        "Scripts on a GPU, shown to the doctor",
        ["script", "promised", "gained", "doctor s", "what it said"],
        [line_of(row) for row in rows],
        [f"{row.name} on {row.device}" for row in rows if row.device],
        keys_of(rows),
        {"rows": [vars(row) for row in rows]},
    )
    return finish(results, arguments)


if __name__ == "__main__":
    sys.exit(main())
