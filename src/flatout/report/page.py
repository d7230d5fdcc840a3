"""A doctor's verdict as one HTML file that loads nothing from elsewhere.

    Path("doctor.html").write_text(page(verdict), encoding="utf-8")

The page can be read on a phone, on paper or on a screen. Text from the script, such as paths and
lines of code, is escaped. The page's content policy also forbids scripts and network access.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from statistics import mean, median
from typing import Any

from pydantic import TypeAdapter

from flatout.doctor import Finding
from flatout.observe import Observation
from flatout.report.observed import observed
from flatout.report.pictures import MOST_RANKS, lane_bars, lane_rows
from flatout.report.templates import plain, template
from flatout.report.trial_table import step_ratio, trials_of, with_proofs
from flatout.words import counted, duration, rounded

LANE_WORDS = {
    "input": "waiting for input",
    "copy": "copying batches to the device",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "sync": "adding up gradients over the ranks",
    "optimizer": "updating the parameters",
    "host": "work between the calls, such as logging and reading values back",
    "evaluation": "evaluation on other data",
    "saving": "writing checkpoints and models",
    "gc": "Python's garbage collection",
    "idle": "outside of all calls that were seen",
}
"""Descriptions of a step's activity in each lane."""

PARITY_WORDS = {
    "bit-identical": "the same bits as before",
    "rounding": "the same computation, rounded otherwise",
    "redrawn": "the same distribution, other random draws",
    "changes learning": "something else is optimized; never applied unasked",
}


def page(verdict: Mapping[str, Any]) -> str:
    given = verdict.get("prescription") or {}
    ranks = observed(verdict.get("observations"))
    found = with_proofs(verdict.get("findings") or [], given)
    findings = TypeAdapter(list[Finding]).validate_python(found)
    command = verdict.get("command") or (ranks[0].command if ranks else "")
    lanes = {rank.rank: rank.lanes_ms for rank in ranks}
    slowest = max(ranks, key=lambda value: median(_finite(value.step_ms) or [0.0]), default=None)
    times = sorted(_finite(slowest.step_ms)) if slowest else []
    whole_run: list[Any] = [given.get("before_s"), given.get("after_s")]
    bars = lane_bars(lanes)
    shown = {bar.rank for bar in bars}
    return template("page.html.jinja").render(
        command=command if isinstance(command, str) else shlex.join(map(str, command)),
        sentence=sentence(verdict),
        dangers=[finding for finding in findings if finding.kind == "danger"],
        slow=[finding for finding in findings if finding.kind == "slow"],
        notes=[finding for finding in findings if finding.kind == "note"],
        code=_code(verdict.get("observations") or []),
        ranks=ranks,
        drawn=[rank for rank in ranks if rank.rank in shown] if shown else ranks[:MOST_RANKS],
        step_ms=mean(bar.ms for bar in bars) if bars else None,
        bars=bars,
        rows=lane_rows(lanes),
        lane_words=LANE_WORDS,
        critical={"where": "", **(verdict.get("critical") or {"words": ""})},
        unseen=sorted({lane for of in lanes.values() for lane, ms in of.items() if ms is None}),
        left_out=[
            (str(one.site), one.words, *one.ms())
            for rank in ranks
            for one in rank.left_out
            if one.is_proven
        ],
        slowest=slowest if times else None,
        quantiles=times and (median(times), times[math.ceil(0.95 * len(times)) - 1], times[-1]),
        trials=trials_of(given),
        whole_run=[duration(s) for s in whole_run] if all(whole_run) else None,
        run_steps=given.get("run_steps"),
        verified=[str(line) for line in (verdict.get("verified") or {}).get("words", [])],
        stopped=str(given.get("stopped") or ""),
        refused=[f"{item['what']} ({item['where']})" for item in given.get("refused") or []],
        parity_words=PARITY_WORDS,
        passed=[str(name) for name in verdict.get("passed") or []],
        unknown=[(str(name), str(reason)) for name, reason in verdict.get("unknown") or []],
        environment={
            str(name).replace("_", " "): plain(value)
            for name, value in (verdict.get("environment") or {}).items()
        },
    )


def sentence(verdict: Mapping[str, Any]) -> str:
    ranks = observed(verdict.get("observations"))
    kinds = [item.get("kind") for item in verdict.get("findings") or []]
    speed = _about_the_run(ranks) or _about_speed(verdict, ranks, kinds.count("slow"))
    dangers = kinds.count("danger")
    if not dangers:
        return f"{speed}."
    return f"{speed}; {counted(dangers, 'danger')} to the job or its result."


def _about_the_run(ranks: Sequence[Observation]) -> str | None:
    failed = next((rank for rank in ranks if rank.ended == "failed"), None)
    if failed is not None:
        last = failed.error.strip().splitlines()[-1:] or ["it left no message"]
        on_rank = f" on rank {failed.rank}" if len(ranks) > 1 else ""
        return f"The script failed{on_rank}: {last[0].strip().rstrip('.')}"
    if ranks and all(not rank.steps for rank in ranks):
        return "No training step was seen, so there is nothing to say about speed"
    return None


def _about_speed(verdict: Mapping[str, Any], ranks: Sequence[Observation], slow: int) -> str:
    given = verdict.get("prescription") or {}
    trials, before, after = trials_of(given), given.get("before_s"), given.get("after_s")
    if before and after and after < before:
        return (
            f"With what was proven your whole run takes {duration(after)} instead of "
            f"{duration(before)}, {rounded(before / after, 2)} times as fast, warm-up included"
        )
    ratio = step_ratio(trials)
    if ratio:
        return f"With what was proven a step is {ratio[1]:.2f} times as fast"
    if trials:
        if all(item.ratio is None for item in trials):
            return "No change was measured, so nothing is proven"
        if any(item.wins for item in trials):
            return "At least one change was proven to make a step faster than noise can explain"
        if untried := sum(item.group == "not tried" for item in trials):
            return f"Nothing is proven yet: {counted(untried, 'change')} had no time to be tried"
        return "No change that was tried is worth it for this run: leave it as it is"
    rows = lane_rows({rank.rank: rank.lanes_ms for rank in ranks})
    where = ""
    if rows:
        whole = sum(row.ms for row in rows)
        words = LANE_WORDS.get(rows[0].lane, rows[0].lane)
        where = f"A step takes {rounded(whole)} ms, {rows[0].share:.0%} of it {words}"
        if critical := verdict.get("critical"):
            share = f"{critical['share']:.0%}"
            where = f"A step takes {rounded(whole)} ms; {critical['words']} ({share})"
    if slow:
        cures = f"{counted(slow, 'finding')} may give time back, nothing is proven yet"
        return f"{where}; {cures}" if where else cures
    if where:
        return f"{where}; no check found anything that holds it back"
    return "Nothing was found that holds this job back"


def _code(observed: Any) -> dict[str, str]:
    return {f"{site['file']}:{site['line']}": site["code"] for site in _sites(observed)}


def _sites(data: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(data, Mapping):
        if data.get("code") and "file" in data and "line" in data:
            yield data
        for value in data.values():
            yield from _sites(value)
    elif isinstance(data, list | tuple) and data and isinstance(data[0], Mapping | list | tuple):
        for value in data:
            yield from _sites(value)


def _finite(values: Sequence[float]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value) and value > 0]
