"""One run, or several runs in the same charts, as one HTML file that loads nothing from elsewhere.

    Path("report.html").write_text(run_page([SeenRun.read("runs/today")]), encoding="utf-8")

Text from a run, such as names and paths, is escaped. The page's content policy also forbids scripts
and network access.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from flatout.masked import masked
from flatout.measure import Profile
from flatout.report.page import LANE_WORDS
from flatout.report.pictures import (
    HEIGHT,
    Bar,
    Chart,
    LaneRow,
    Line,
    chart,
    color_of,
    lane_bars,
    lane_rows,
)
from flatout.report.run import SeenRun, names_of
from flatout.report.run_comparison import Comparison, Pair
from flatout.report.templates import plain, template
from flatout.report.trial_table import Trial
from flatout.train import words_of
from flatout.words import count_words, counted, duration, rounded

# Maximum number of figures that are drawn, the loss first.
_MOST_CURVES = 8
# Smallest share of a step spent waiting for input or other ranks that counts as a danger to speed.
_WAITS = 0.25


@dataclass(frozen=True)
class _Lanes:
    bars: list[Bar]
    rows: list[LaneRow]
    count: int


@dataclass(frozen=True)
class _Decision:
    field: str
    value: str
    reason: str
    measured: str


def run_page(runs: Sequence[SeenRun], comparison: Comparison | None = None) -> str:
    names = names_of(runs)
    only = runs[0] if len(runs) == 1 else None
    profile = only.profile if only else None
    trials = _trials(only) if only else []
    pairs: Sequence[Pair] = comparison.pairs if comparison else ()
    return template("run.html.jinja").render(
        title=" and ".join(names),
        sentence=sentence(only) if only else "; ".join(pair.sentence for pair in pairs),
        command=list(map(shlex.quote, masked(profile.command))) if profile else [],
        soft=[line for run in runs for line in (*(_soft(run) if only else ()), *run.problems)]
        + list(dict.fromkeys(line for pair in pairs for line in pair.busy)),
        dangers=[
            f"{name}: {line}" if len(runs) > 1 else line
            for run, name in zip(runs, names, strict=True)
            for line in dangers(run)
        ],
        pairs=pairs,
        trained=[
            ("What was trained" if only else name, list(facts(run)))
            for run, name in zip(runs, names, strict=True)
        ],
        lanes_of=[
            ("" if only else name, _lanes(run.profile))
            for run, name in zip(runs, names, strict=True)
            if run.profile is not None
        ],
        lane_words=LANE_WORDS,
        legend=[(name, color_of(number)) for number, name in enumerate(names)],
        curves=_curves(runs, names),
        uses=_uses(runs, names),
        decisions=list(_decisions(only)) if only else [],
        trials=trials,
        height=HEIGHT,
        notes=profile.notes if profile else [],
        environment=list(_environment(profile)) if profile else [],
    )


def sentence(run: SeenRun) -> str:
    words = run.state_words
    rate = run.samples_per_s
    speed = "" if rate is None else f"{count_words(rate.mid)} samples/s"
    profile = run.profile
    if profile is None:
        return f"The run {words}"
    steps = counted(profile.steps.last - profile.steps.first + 1, "step")
    what = f"{profile.model['name']} trained {steps}"
    if run.epochs and profile.resumed is None:  # a resumed run's log has earlier epochs as well
        what += f", {counted(len(run.epochs), 'epoch')}"
    if speed and rate is not None:
        what += f", at {speed} [{count_words(rate.low)}, {count_words(rate.high)}]"
    return f"{what}; it {words}" if words else what


def dangers(run: SeenRun) -> list[str]:
    result = []
    if run.state in ("killed", "failed"):
        result.append(f"The run {run.state_words}.")
    if run.profile is None:
        return result
    result += _losses(run)
    rows = lane_rows({rank.rank: dict(rank.lanes_ms) for rank in run.profile.ranks})
    for row in rows:
        if row.lane in ("input", "sync", "idle") and row.share > _WAITS:
            result.append(f"{row.share:.0%} of a step is {LANE_WORDS[row.lane]}.")
    loud = ("held the training back", "needs", "left out", "not finite", "no room")
    result += [note for note in run.profile.notes if any(word in note for word in loud)]
    return list(dict.fromkeys(result))


def _losses(run: SeenRun) -> Iterator[str]:
    for curve in run.curves:
        values = [value for _, _, value in curve.points]
        if not curve.name.endswith("loss") or len(values) < 3:
            continue
        least = min(values)
        if curve.name.startswith("val_") and values[-1] > 1.1 * least > 0:
            yield (
                f"{curve.name} was {rounded(least, 4)} at best and is {rounded(values[-1], 4)} at "
                "the end: the model fits the training data more and other data less."
            )
        elif not curve.name.startswith("val_") and values[-1] > 1.5 * values[0] > 0:
            yield f"{curve.name} grew from {rounded(values[0], 4)} to {rounded(values[-1], 4)}."


def _soft(run: SeenRun) -> Iterator[str]:
    yield str(run.path)
    if len(run.lives) > 1:
        began = [_when(life.began.get("time")) for life in run.lives]
        yield f"Jobs ran in this folder {len(began)} times, since {began[0]}"
    if run.other_work:
        yield f"{run.other_work[:1].upper()}{run.other_work[1:]}: this affects speed and lanes."


def facts(run: SeenRun) -> Iterator[tuple[str, str]]:
    profile = run.profile
    if profile is None:
        for name, value in run.figures.items():
            yield name, rounded(value, 4)
        return
    model = profile.model
    frozen = model["parameters"] - model["trained"]
    rest = f", {count_words(frozen)} of them frozen" if frozen else ""
    yield "model", f"{model['name']}, {count_words(model['parameters'])} parameters{rest}"
    yield "device", _device_words(profile)
    if profile.data is not None:
        yield "data", _data_words(profile.data)
    for name in ("loss", "metrics", "optimizer 1", "scheduler", "epochs", "seed"):
        if profile.job.get(name) not in (None, "none"):
            yield name, profile.job[name]
    world = profile.world
    if world["size"] > 1:
        hosts = f" on {counted(world['nodes'], 'host')}" if world["nodes"] > 1 else ""
        yield "ranks", f"{world['size']}{hosts}, {world['strategy']}"
    if profile.resumed is not None:
        yield "resumed", f"from {profile.resumed.checkpoint}: figures are of what came after it"
    steps = profile.steps
    numbers = f"{steps.first:,} to {steps.last:,}"
    size = "" if steps.batch_size is None else f", {rounded(steps.batch_size)} samples each"
    yield "steps", f"{numbers}{size}"
    for name, value in run.figures.items():
        yield name, rounded(value, 4)
    yield (
        "time",
        (
            f"start {duration(profile.startup_s)}, evaluation {duration(profile.evaluation_s)}, "
            f"saving {duration(profile.saving_s)}, in all "
            f"{duration(profile.written - profile.began + profile.startup_s)}"
        ),
    )
    yield "began", _when(profile.began)


def _device_words(profile: Profile) -> str:
    first = profile.ranks[0]
    gpus = dict.fromkeys(first.machine.get("gpus") or ())
    processor = ", ".join(gpus) if first.device.startswith("cuda") else first.machine.get("cpu")
    name = f" ({processor})" if processor else ""
    return f"{first.device}{name}, {counted(first.threads, 'thread')}"


def _data_words(data: dict[str, Any]) -> str:
    parts = [str(data["words"])]  # for files, the words are their number and size
    if data.get("newest"):
        parts.append(f"newest {_when(data['newest'])}")
    return " · ".join(parts)


def _lanes(profile: Profile) -> _Lanes:
    by_rank = {rank.rank: dict(rank.lanes_ms) for rank in profile.ranks}
    return _Lanes(lane_bars(by_rank), lane_rows(by_rank), len(by_rank))


def _curves(runs: Sequence[SeenRun], names: Sequence[str]) -> list[tuple[Chart, Chart | None]]:
    result: dict[str, list[tuple[Line, Line]]] = {}
    for number, run in enumerate(runs):
        for curve in run.curves:
            stem = curve.name.removeprefix("val_")
            name = curve.name if len(runs) == 1 else f"{names[number]} {curve.name}"
            by_samples = [(samples, value) for samples, _, value in curve.points]
            by_time = [(seconds, value) for _, seconds, value in curve.points]
            # With a single run, the two lines also differ in color.
            color = number if len(runs) > 1 else int(stem != curve.name)
            lines = tuple(
                Line(name, points, color, stem != curve.name) for points in (by_samples, by_time)
            )
            result.setdefault(stem, []).append((lines[0], lines[1]))
    drawn = []
    for stem in sorted(result, key=lambda value: (value != "loss", "loss" not in value))[
        :_MOST_CURVES
    ]:
        samples, times = zip(*result[stem], strict=True)
        alone = len(runs) == 1
        first = chart(f"{stem} by samples", samples, x_is="samples", shows_names=alone)
        second = chart(f"{stem} by time", times, x_is="seconds", shows_names=alone)
        if first is not None:
            drawn.append((first, second))
    return drawn


def _uses(runs: Sequence[SeenRun], names: Sequence[str]) -> list[Chart]:
    wanted = (
        ("cpus", "CPUs in use", 1.0, ""),
        ("machine", "CPUs of the machine that are busy", 100.0, "%"),
        ("memory_bytes", "resident memory", 1e-9, " GB"),
        ("gpu", "GPU busy", 100.0, "%"),
        ("gpu_memory_bytes", "GPU memory", 1e-9, " GB"),
    )
    result = []
    for column, title, factor, unit in wanted:
        lines = []
        for number, run in enumerate(runs):
            for rank in run.profile.ranks if run.profile is not None else ():
                if column == "machine" and rank.rank:
                    continue  # all ranks share the machine's CPUs
                pairs = zip(rank.use.get("seconds", ()), rank.use.get(column, ()), strict=False)
                points = [(x, factor * y) for x, y in pairs if x is not None and y is not None]
                color = number if len(runs) > 1 else rank.rank
                name = names[number] if len(runs) > 1 else f"rank {rank.rank}"
                lines.append(Line(name, points, color, is_stepped=True))
        has_ranks = len(runs) == 1 and len(lines) > 1
        drawn = chart(
            title, lines, x_is="seconds", from_zero=True, unit=unit, shows_names=has_ranks
        )
        if drawn is not None:
            result.append(drawn)
    return result


def _decisions(run: SeenRun) -> Iterator[_Decision]:
    recipe = (run.profile.recipe if run.profile is not None else run.history.get("recipe")) or {}
    for field, reason in (recipe.get("reasons") or {}).items():
        measured = str((recipe.get("measured") or {}).get(field) or "")
        yield _Decision(field, plain(recipe["values"].get(field)), str(reason), measured)


def _trials(run: SeenRun) -> list[Trial]:
    try:
        return list(_trials_of(run.history.get("tuning") or {}))
    except (LookupError, TypeError, ValueError, AttributeError):
        run.problems.append(f"{run.path / 'history.json'}: its trials cannot be read")
        return []


def _trials_of(tuning: Mapping[str, Any]) -> Iterator[Trial]:
    for item in tuning.get("trials", ()):
        changed = {field: v for field, v in item["b"].items() if item["a"].get(field) != v}
        steps = f"steps {item['first']:,} to {item['last']:,}"
        yield Trial(
            name=words_of(changed),
            group="",
            ratio=(item["low"], item["ratio"], item["high"]),
            floor=item["floor"],
            parity="",
            loss=steps,
            verdict="kept" if item["chosen"] == "b" else "not kept",
        )


def _environment(profile: Profile) -> Iterator[tuple[str, str]]:
    first = profile.ranks[0]
    yield "host", ", ".join(dict.fromkeys(rank.host for rank in profile.ranks))
    for name, value in first.machine.items():
        if name not in profile.versions and value not in ([], None, ""):
            yield name.replace("_", " "), plain(value)
    for name, value in profile.versions.items():
        yield name, value
    if profile.network is not None:
        rate = profile.network.get("mbit_per_s")
        speed = f", {rate:,} Mbit/s" if rate else ", rate unknown"
        yield "network", f"{profile.network.get('interface')}{speed}"


def _when(seconds: Any) -> str:
    if not isinstance(seconds, int | float):
        return "unknown"
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")
