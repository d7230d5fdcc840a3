"""Which tool names what holds a script back, gives the cure, and proves it.

    python bench/doctor_peers.py [--only NAME ...] [--budget 120] [--keep FOLDER] [--json [FILE]]

Some scripts of `bench/corpus` are shown to `flatout doctor`, to TraceML (`traceml-ai`) with the
lines that its manual asks for, to torch.profiler, and, where there is a port of the script, to
Lightning's SimpleProfiler. One rule for all, applied by this program to what each says first:

    part    says which part of a step the time goes to, or for a danger, which part is wrong
    cause   names the cause: its function or setting, or one of the lines marked in the script
    cure    says what to do about it: words of the cure
    proved  has run the script with and without that cure, and says how much faster it is

What counts as said first: of the doctor its dangers and what could be tried, ten at most; of
TraceML its verdict with reason and next step, and the row that it marks as the cause; of the
profilers the first ten rows of their tables. The words that are looked for are below, as broad as
any of these tools could put it. `--keep` leaves what each said, to see for yourself.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path

from pitfalls import Pitfall, absence, read_index
from remeasure import FLATOUT
from restarts import PEERS, PROGRESS, each, run_to_end, tell
from results import Key, Results, add_json_argument, add_limits, finish

TIMEOUT_S = 600.0
# Of a reason in the table; `--keep` has it whole.
_WIDTH = 30
FIRST = 10


@dataclass(frozen=True)
class Words:
    """What a tool may say of a pitfall; regular expressions, in any case of letters."""

    part: str
    cause: str
    cure: str


SCRIPTS: Mapping[str, Words] = {
    "workers_zero": Words(
        part=r"input|data.?load|_next\b|fetch",
        cause=r"num_workers|__getitem__|\bworkers\b|spectr|rfft",
        cure=r"num_workers\s*=\s*[1-9]|(increase|more|add|raise)\s+\w*\s*workers",
    ),
    "log_each_step": Words(
        part=r"host|residual|logging|callback|batch_end|item\b",
        cause=r"fsync|recorder|\blog\b.*\b(each|every) step|logging",
        cure=r"(log|record)\w*.*(less|rarely|every|interval|rare)",
    ),
    "fp32_slow": Words(
        part=r"comput|forward|backward|addmm|\bmm\b|linear",
        cause=r"fp32|float32|bf16|bfloat16|precision",
        cure=r"autocast|bf16|bfloat16|mixed precision",
    ),
    "garbage_each_step": Words(
        part=r"garbage|\bgc\b|host|residual",
        cause=r"gc\.collect|garbage collect",
        cure=r"(remove|delete|drop|without|take out|leave out|schedul|interval|rarely|less)",
    ),
    "eval_missing": Words(
        part=r"evaluat|validat",
        cause=r"eval\(\)|train(ing)? mode|dropout.*(validat|evaluat)",
        cure=r"\.eval\(\)",
    ),
    "optimizer_unfused": Words(
        part=r"optimi[sz]er",
        cause=r"adamw?\b|foreach|fused",
        cure=r"fused\s*=\s*true",
    ),
}


@dataclass(frozen=True)
class Said:
    """What a tool said of a script.

    Args:
        first: what counts, line by line.
        proved: the ratios of time that it has measured, in words, by what they are of.
        reason: why it said nothing, or empty.
        whole: all that it said.
    """

    first: Sequence[str] = ()
    proved: Sequence[str] = ()
    reason: str = ""
    whole: str = ""


@dataclass(frozen=True)
class Judged:
    """What that is worth."""

    tool: str
    part: bool
    cause: bool
    cure: bool
    proved: bool
    reason: str = ""

    @property
    def words(self) -> str:
        told = [name for name in ("part", "cause", "cure", "proved") if getattr(self, name)]
        return textwrap.shorten(self.reason, _WIDTH) or ", ".join(told) or "nothing of it"


def judged(tool: str, pitfall: Pitfall, said: Said) -> Judged:
    """Looks for the words in what was said first."""
    words = SCRIPTS[pitfall.name]
    # The script's own name holds some of the words.
    lines = [line.replace(pitfall.name, "SCRIPT") for line in said.first]

    def is_there(pattern: str) -> bool:
        return any(re.search(pattern, line, re.IGNORECASE) for line in lines)

    marked = "|".join(map(str, sorted(pitfall.marked)))
    cause = is_there(words.cause) or is_there(rf"\bSCRIPT\.py(:|\(|, line )({marked})\b")
    return Judged(
        tool,
        part=is_there(words.part) or cause,
        cause=cause,
        # A cure of something else is none of this.
        cure=cause and is_there(words.cure),
        proved=cause and any(re.search(words.cure, one, re.IGNORECASE) for one in said.proved),
        reason=said.reason,
    )


# -- the tools -----------------------------------------------------------------------------------


def flatout(pitfall: Pitfall, folder: Path, budget: float) -> Said:
    trials = ["--yes", "--budget", f"{budget:g}s"] if budget else []
    command = [*FLATOUT, "doctor", "--json", *trials, "--", str(pitfall.script)]
    out, err, code = run_to_end(command, folder, TIMEOUT_S + budget)
    try:
        verdict = json.loads(out)
    except ValueError:
        return Said(reason=_ended(err, code), whole=out + err)
    found = [(one, f"{one['where']} {one['what']} do: {one['do']}") for one in verdict["findings"]]
    words = {one["name"]: line for one, line in found}
    proofs = (verdict.get("prescription") or {}).get("proofs", [])
    return Said(
        [line for one, line in found if one["kind"] != "note"][:FIRST],
        [
            f"{proof['trial']['ratio']:.2f}x {words.get(name, '')} {proof['words']}"
            for proof in proofs
            if proof["outcome"] == "prescribed" and proof["trial"]
            for name in proof["names"]
        ],
        whole=out,
    )


def traceml(pitfall: Pitfall, folder: Path, budget: float) -> Said:
    script = folder / pitfall.script.name
    script.write_text(with_traceml(pitfall.script.read_text()))
    command = [str(Path(sys.executable).with_name("traceml")), "run", "--run-name", "run"]
    out, err, code = run_to_end([*command, str(script)], folder, TIMEOUT_S)
    summary = folder / "logs" / "run" / "final_summary.txt"
    if code != 0 or not summary.exists():
        return Said(reason=_ended(err or out, code), whole=out + err)
    lines = [line.strip("| ") for line in summary.read_text().splitlines()]
    first = [
        line for line in lines if line.startswith(("Verdict:", "Why:", "Next:")) or "◀" in line
    ]
    return Said(first, whole="\n".join(lines))


def with_traceml(source: str) -> str:
    """The script with what TraceML's manual asks for: init, and the steps' body in trace_step."""
    tree, lines = ast.parse(source), source.splitlines()
    loops = [one for one in ast.walk(tree) if isinstance(one, ast.For) and _steps(one.body)]
    body = max(loops, key=lambda loop: loop.lineno).body
    indent = " " * body[0].col_offset
    first, last = body[0].lineno - 1, body[-1].end_lineno
    within = [f"    {line}" if line else line for line in lines[first:last]]
    lines[first:last] = [f"{indent}with traceml_ai.trace_step(model):", *within]
    main = next(one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name == "main")
    lines.insert(main.lineno, '    traceml_ai.init(mode="auto")')
    imports = next(one for one in tree.body if isinstance(one, (ast.Import, ast.ImportFrom)))
    lines.insert(imports.lineno - 1, "import traceml_ai")
    return "\n".join(lines) + "\n"


def _steps(body: Sequence[ast.stmt]) -> bool:
    calls = [one for part in body for one in ast.walk(part) if isinstance(one, ast.Call)]
    return any(ast.unparse(call.func) == "optimizer.step" for call in calls)


def torch_profiler(pitfall: Pitfall, folder: Path, budget: float) -> Said:
    # All steps of a whole run do not fit into memory.
    few = [str(pitfall.script), "--epochs", "1", "--steps", "20"]
    command = [sys.executable, str(PEERS / "doctor_torch_profiler.py"), *few]
    out, err, code = run_to_end(command, folder, TIMEOUT_S)
    if code != 0:
        return Said(reason=_ended(err, code), whole=out + err)
    return Said(list(rows_of_torch(out)), whole=out)


def rows_of_torch(table: str) -> Iterator[str]:
    """The first rows of torch.profiler's table, each with the lines of source below it."""
    rules = [n for n, line in enumerate(table.splitlines()) if line.startswith("-----")]
    lines = table.splitlines()[rules[1] + 1 : rules[2]]
    row = ""
    found = 0
    for line in lines:
        if line[:1].strip() or re.search(r"\d%", line):
            if row:
                yield row
            found += 1
            row = ""
        if found > FIRST:
            return
        row = f"{row} {' '.join(line.split())}".strip()
    if row:
        yield row


def lightning(pitfall: Pitfall, folder: Path, budget: float) -> Said:
    port = PEERS / "doctor_lightning.py"
    if pitfall.name not in lightning_ports():
        return Said(reason="no port to Lightning")
    command = [sys.executable, str(port), str(pitfall.script)]
    out, err, code = run_to_end(command, folder, TIMEOUT_S)
    if code != 0:
        return Said(reason=_ended(err, code), whole=out + err)
    rows = [line for line in (out + err).splitlines() if line.count("|") >= 5]
    return Said([row for row in rows if "%" not in row and "Total" not in row][:FIRST], whole=out)


def lightning_ports() -> set[str]:
    """Read from the file: importing it needs Lightning."""
    for one in ast.parse((PEERS / "doctor_lightning.py").read_text()).body:
        if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "PORTS":
            assert isinstance(one.value, ast.Dict)
            return {ast.literal_eval(key) for key in one.value.keys if key}
    raise AssertionError("no PORTS")


def _ended(err: str, code: int | None) -> str:
    words = err.strip().splitlines() or ["it said nothing"]
    when = f"no answer in {TIMEOUT_S:.0f} s" if code is None else f"exit code {code}"
    return f"{when}: {words[-1].strip()[:80]}"


@dataclass(frozen=True)
class Tool:
    """Who is asked: how, and the module without which it cannot be."""

    ask: Callable[[Pitfall, Path, float], Said]
    needs: str


TOOLS = {
    "flatout doctor": Tool(flatout, "flatout"),
    "TraceML": Tool(traceml, "traceml_ai"),
    "torch.profiler": Tool(torch_profiler, "torch"),
    "Lightning SimpleProfiler": Tool(lightning, "lightning"),
}


# -- the table -----------------------------------------------------------------------------------


def ask_all(
    pitfalls: Sequence[Pitfall], budget: float, keep: Path | None
) -> dict[str, list[Judged]]:
    rows: dict[str, dict[str, Judged]] = {pitfall.name: {} for pitfall in pitfalls}

    def ask_one(unit: tuple[Pitfall, str]) -> None:
        pitfall, name = unit
        rows[pitfall.name][name] = ask(name, TOOLS[name], pitfall, budget, keep)

    each(product(pitfalls, TOOLS), ask_one)
    return {
        name: [row.get(tool) or Judged(tool, *[False] * 4, PROGRESS.reason) for tool in TOOLS]
        for name, row in rows.items()
    }


def ask(name: str, tool: Tool, pitfall: Pitfall, budget: float, keep: Path | None) -> Judged:
    missing = absence(pitfall) or ("" if find_spec(tool.needs) else f"{tool.needs} is absent")
    if missing:
        said = Said(reason=missing)
    else:
        with tempfile.TemporaryDirectory(prefix="flatout-bench-") as folder:
            said = tool.ask(pitfall, Path(folder), budget)
    if keep:
        file = keep / f"{pitfall.name}, {name}.txt"
        file.write_text("\n".join([*said.first, *said.proved, "", said.whole]))
    found = judged(name, pitfall, said)
    tell(f"{pitfall.name}: {name}: {found.words}")
    return found


def keys_of(rows: Mapping[str, Sequence[Judged]]) -> list[Key]:
    """How many of the causes each tool names, and proves the cure of."""
    keys = []
    for name in TOOLS:
        own = [one for row in rows.values() for one in row if one.tool == name]
        asked = [one for one in own if not one.reason]
        for what in ("cause", "cure", "proved"):
            share = sum(getattr(one, what) for one in asked) / len(asked) if asked else "not asked"
            keys.append(Key(f"{name}: {what}", share, note=f"of {len(asked)} scripts"))
    return keys


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_json_argument(parser)
    add_limits(parser)
    parser.add_argument("--only", nargs="+", choices=[*SCRIPTS], metavar="NAME")
    parser.add_argument("--budget", type=float, default=120, help="of flatout doctor's trials")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="for what each tool said")
    parser.set_defaults(check=False)  # there is nothing to meet: it compares
    return parser.parse_args()


def main() -> int:
    arguments = read_arguments()
    if arguments.keep:
        arguments.keep.mkdir(parents=True, exist_ok=True)
    wanted = arguments.only or [*SCRIPTS]
    rows = ask_all([p for p in read_index() if p.name in wanted], arguments.budget, arguments.keep)
    results = Results(
        title="Who names the cause, gives the cure, and has proved it",
        headers=["", *TOOLS],
        lines=[[name, *(one.words for one in row)] for name, row in rows.items()],
        remarks=[],
        keys=keys_of(rows),
        data={"rows": {name: [asdict(one) for one in row] for name, row in rows.items()}},
    )
    return finish(results, arguments)


if __name__ == "__main__":
    sys.exit(main())
