"""Explanation of a fit's speed from `History.as_dict`: trials, chosen settings, and the roofline.

`history.explain()` returns this text and `flatout explain` prints it; the picture is drawn in
`explanation_picture.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from textwrap import wrap
from typing import Any

from flatout.measure import ROUGH, bound, fingerprint, machine_rates, predicted
from flatout.recipe import SETTINGS, phrase
from flatout.words import counted, duration, rounded

TABLES = "tables: "
"""Start of the note that reports how embedding tables are stepped."""

_WIDTH = 80
_BAR = 20
# Number of columns for a trial's name; after a longer name, the figures are on a line of their own.
_NAME = 34
# Maximum number of ranges of steps that are listed for each choice of settings.
_MOST_SPANS = 5
# Maximum factor by which a lane may be faster than its computed limit, since counts are not exact.
_CONTRADICTS = 1.15
# Recipe fields that a roofline distinguishes, with their plain values.
_KNOWN = {
    field: SETTINGS[field].plain
    for field in (
        "compute.precision",
        "compute.memory_format",
        "compute.fused_optimizer",
        "compute.compile",
        "compute.capture",
        "compute.cuda_graph",
    )
}
_OPTIONS: tuple[dict[str, Any], ...] = (
    {"compute.fused_optimizer": "on"},
    {"compute.precision": "bf16"},
    {"compute.memory_format": "channels_last"},
    {"compute.precision": "bf16", "compute.memory_format": "channels_last"},
)


@dataclass(frozen=True)
class Lane:
    """Time of a lane in the median step, and its limit at this machine's best rates.

    Attributes:
        name: "forward", "backward" or "optimizer"; "step" where steps are one compiled graph.
        took_s: measured seconds of the lane; 0 if no step was recorded.
        kinds: smallest possible seconds of the lane's operators, by kind of operator.
    """

    name: str
    took_s: float
    kinds: Mapping[str, float]

    @property
    def least_s(self) -> float:
        """Smallest possible seconds of the lane."""
        return sum(self.kinds.values())

    @property
    def share(self) -> float:
        """Ratio of the smallest possible time to the measured time: 1 at the limit."""
        return min(1.0, self.least_s / self.took_s) if self.took_s else 0.0


@dataclass(frozen=True)
class Explanation:
    """Explanation of a fit's settings and speed.

    Attributes:
        history: the result of `History.as_dict`.
        rates: best rates of the machine that the fit ran on; None where they are unknown.
    """

    history: Mapping[str, Any]
    rates: Mapping[str, Any] | None

    @classmethod
    def of(cls, history: Mapping[str, Any]) -> Explanation:
        """Explain a fit; measure the rates of this machine if that was never done.

        Args:
            history: the result of `History.as_dict`.
        """
        counts = history.get("roofline")
        if not counts:
            return cls(history, None)
        if counts["machine"] == fingerprint().digest:
            return cls(history, machine_rates(counts["device"], counts["threads"]))
        return cls(history, counts["rates"])

    @property
    def settings(self) -> dict[str, Any]:
        """Values of the Recipe's fields at the end of the fit."""
        recipe = self.history.get("recipe")
        return dict(recipe["values"]) if recipe else {}

    @property
    def is_captured(self) -> bool:
        """Whether a graph, which has no lanes, made the median step."""
        took = self.history.get("steady_lanes_s") or {}
        graphs = ("compute.capture", "compute.cuda_graph")
        is_on = any(self.settings.get(field) == "on" for field in graphs)
        return is_on and not took.get("backward")

    @cached_property
    def doubt(self) -> str:
        """The reason why no limits and gains are shown; "" if they are shown."""
        if self.rates is None:
            return ""
        if self.rates["spread"] > ROUGH:
            return (
                "the rates are rough: other jobs kept the machine busy while the rates were "
                "measured; they are measured again next time"
            )
        for lane in self._all_lanes:
            if lane.took_s and lane.least_s > _CONTRADICTS * lane.took_s:
                return (
                    f"{lane.name} took {_ms(lane.took_s)}, less than the minimum of "
                    f"{_ms(lane.least_s)} at the best rates that were measured here: other jobs "
                    "kept the machine busy while the rates were measured"
                )
        return ""

    @cached_property
    def lanes(self) -> list[Lane]:
        """Lanes of a step, with limits if there is no `doubt`; empty without counts or rates."""
        lanes = self._all_lanes
        return [replace(lane, kinds={}) for lane in lanes] if self.doubt else lanes

    @cached_property
    def _all_lanes(self) -> list[Lane]:
        counts = self.history.get("roofline")
        if not counts or self.rates is None:
            return []
        took = self.history.get("steady_lanes_s") or {}
        least = bound(counts, self.rates, self.settings)
        if self.is_captured:
            return [Lane("step", took.get("forward", 0.0), _summed(least.values()))]
        return [Lane(name, took.get(name, 0.0), kinds) for name, kinds in least.items()]

    @cached_property
    def possible_savings(self) -> list[tuple[str, float, float]]:
        """Settings in words, smallest possible seconds of a step under them, and the gain."""
        counts = self.history.get("roofline")
        if not counts or self.rates is None or self.doubt:
            return []
        plain = predicted(counts, self.rates, {})
        result = [("plain", plain, 1.0)]
        images = any(kind.startswith("conv") for of in counts["lanes"].values() for kind in of)
        ran = {f: v for f, v in self.settings.items() if v != _KNOWN.get(f, v)}
        for option in [*_OPTIONS, *([ran] if ran and ran not in _OPTIONS else [])]:
            if option is ran or images or "compute.memory_format" not in option:
                seconds = predicted(counts, self.rates, option)
                result.append((words_of(option), seconds, plain / max(seconds, 1e-12)))
        return result

    def as_dict(self) -> dict[str, Any]:
        """Return plain data: trials, choices, and the roofline in seconds."""
        recipe = self.history.get("recipe")
        return {
            "tuning": self.history.get("tuning"),
            "recipe": recipe,
            "evaluation": self.history.get("evaluation"),
            "features": self.history.get("features"),
            "roofline": None
            if not self.lanes
            else {
                "lanes": {
                    lane.name: {
                        "took_s": lane.took_s,
                        "least_s": lane.least_s,
                        "share": lane.share,
                        "kinds_s": dict(lane.kinds),
                    }
                    for lane in self.lanes
                },
                "promised": [
                    {"settings": words, "least_s": seconds, "gain": gain}
                    for words, seconds, gain in self.possible_savings
                ],
                "doubt": self.doubt,
                "counts": self.history["roofline"],
                "rates": self.rates,
            },
        }

    def lines(self, full: str = "█", empty: str = "░") -> list[str]:
        """Return the text, no wider than 80 columns.

        Args:
            full: character for the filled part of a bar.
            empty: character for the rest of a bar.
        """
        parts = [
            self._tuning(),
            self._choices(),
            self._tables(),
            self._evaluation(),
            self._features(),
            self._roofline(full, empty),
        ]
        written = [lines for part in parts if (lines := list(part))]
        return [line.rstrip() for lines in written for line in (*lines, "")][:-1]

    # -- trials and choices ------------------------------------------------------------------

    def _tuning(self) -> Iterator[str]:
        tuning = self.history.get("tuning")
        if tuning is None:
            yield from _wrapped("tuning: nothing was measured on this run's steps")
            return
        yield from _wrapped(f"tuning: {self._cost(tuning)}")
        if not tuning["done"]:
            yield from _wrapped(f"it ended early: {tuning['why'] or 'the run was over'}", 2)
        if tuning["trials"]:
            yield ""
            yield f"  {'tried':{_NAME}}{'faster':18}{'noise':>6}  steps"
        for trial in tuning["trials"]:
            yield from _trial(trial)
        if tuning.get("captures"):
            yield ""
        for item in tuning.get("captures", ()):
            yield from _wrapped(_captured(item), 2)
        if tuning["dropped"]:
            yield ""
            yield "  not used, and the reason"
            for field, why in tuning["dropped"].items():
                yield from _wrapped(f"{'all together' if field == 'together' else field}: {why}", 4)
        if tuning["spans"]:
            yield ""
            yield "  settings of the steps"
            yield from _spans(tuning["spans"])

    def _cost(self, tuning: Mapping[str, Any]) -> str:
        before, lost = tuning["before_first_step_s"], tuning["lost_s"]
        run_s = before + self.history["steps"] * sum(self.history["lanes_ms"].values()) / 1e3
        share = f" ({(before + lost) / run_s:.1%} of the run)" if run_s else ""
        return (
            f"{duration(before)} before the first step, {duration(lost)} lost in slower steps "
            f"and switching{share}"
        )

    def _choices(self) -> Iterator[str]:
        recipe = self.history.get("recipe")
        if recipe is None:
            return
        yield from _wrapped(f"chosen: {recipe['summary']}")
        measured = recipe.get("measured", {})
        for field, reason in recipe["reasons"].items():
            value = f"{field} = {recipe['values'].get(field)}"
            yield f"  {value}" + (f"  {measured[field]}" if measured.get(field) else "")
            yield from _wrapped(reason, 4)

    def _tables(self) -> Iterator[str]:
        notes = [note for note in self.history.get("notes", ()) if note.startswith(TABLES)]
        for note in notes[-1:]:  # later steps may have shown that a table is read whole
            yield from _wrapped(note)

    def _evaluation(self) -> Iterator[str]:
        evaluation = self.history.get("evaluation")
        if evaluation is None:
            return
        yield "evaluation"
        for size in evaluation["sizes"]:
            words = f"{size['b']:,} samples at a time instead of {size['a']:,}: {_ratio(size)}"
            is_kept = "kept" if size["chosen"] == "b" else "not kept"
            yield from _wrapped(f"{words} as fast, {is_kept}", 2)
        for graph in evaluation["graphs"]:
            yield from _wrapped(_graph(graph), 2)

    def _features(self) -> Iterator[str]:
        result = self.history.get("features")
        reasons = (self.history.get("recipe") or {}).get("reasons", {})
        if result is not None and result["line"] != reasons.get("input.features"):
            yield from _wrapped(result["line"])

    # -- the roofline ------------------------------------------------------------------------

    def _roofline(self, full: str, empty: str) -> Iterator[str]:
        counts = self.history.get("roofline")
        if not counts:
            yield from _wrapped("roofline: the operators of a step were not counted")
            return
        if self.rates is None:
            yield from _wrapped(
                "roofline: this run was on another machine, whose best rates were not measured; "
                "explain the run on that machine"
            )
            return
        where = counted(counts["threads"], "thread") if counts["device"] == "cpu" else "a GPU"
        yield from _wrapped(
            f"roofline: measured time of a step of {counted(counts['samples'], 'sample')} on "
            f"{where}, and its minimum at the best rates of this machine"
        )
        if counts.get("step", 1) > 1:
            yield from _wrapped(
                f"counted at step {counts['step']:,}, when other layers began to train", 2
            )
        if self.is_captured:
            kind = "compiled" if self.settings.get("compute.capture") == "on" else "CUDA"
            yield from _wrapped(
                f"steps ran as one {kind} graph, which is measured as a whole and called once", 2
            )
        if self.doubt:
            yield from _wrapped(f"no limits are shown: {self.doubt}", 2)
            for lane in self.lanes:
                yield f"  {lane.name:12}{_ms(lane.took_s) if lane.took_s else '-':>10}"
            return
        if (self.history.get("features") or {}).get("kept"):
            yield from _wrapped(
                "the measured time of forward includes the frozen layers in steps that did not "
                "have their kept features yet; the minimum does not include these layers",
                2,
            )
        yield ""
        yield f"  {'lane':12}{'took':>10}{'at least':>11}  "
        for lane in self.lanes:
            if lane.took_s:
                bar = f"{_bar(lane.share, full, empty)} {lane.share:.0%}"
                took = _ms(lane.took_s)
            else:
                bar, took = "", "-"
            yield f"  {lane.name:12}{took:>10}{_ms(lane.least_s):>11}  {bar}"
        took_s = sum(lane.took_s for lane in self.lanes)
        yield f"  {'all':12}{_ms(took_s):>10}{_ms(sum(lane.least_s for lane in self.lanes)):>11}"
        yield ""
        yield f"  {'operators':22}{'at least':>11}"
        kinds = self._kinds()
        longest = max(kinds.values(), default=0.0)
        for kind, seconds in kinds.items():
            bar = full * max(1, round(_BAR * seconds / longest))
            yield f"  {kind:22}{_ms(seconds):>11}  {bar}"
        yield ""
        yield f"  {'settings':42}{'at least':>11}{'gain':>9}"
        for words, seconds, gain in self.possible_savings:
            yield f"  {words:42}{_ms(seconds):>11}{'' if words == 'plain' else f'{gain:.2f}x':>9}"

    def _kinds(self) -> dict[str, float]:
        result = _summed(lane.kinds for lane in self.lanes)
        whole = sum(result.values())
        shown = {kind: seconds for kind, seconds in result.items() if seconds > 0.005 * whole}
        return dict(sorted(shown.items(), key=lambda value: -value[1]))


def _summed(lanes: Iterable[Mapping[str, float]]) -> dict[str, float]:
    result: dict[str, float] = {}
    for kinds in lanes:
        for kind, seconds in kinds.items():
            result[kind] = result.get(kind, 0.0) + seconds
    return result


def words_of(settings: Mapping[str, Any]) -> str:
    """Describe settings that are not plain, such as "bf16 · channels_last"."""
    result = (phrase(f, v) if f in SETTINGS else f"{f}: {v}" for f, v in settings.items())
    return " · ".join(result) or "plain"


def _trial(trial: Mapping[str, Any]) -> Iterator[str]:
    a, b = trial["a"], trial["b"]
    changed = {field: value for field, value in b.items() if a.get(field) != value}
    rest = {field: value for field, value in b.items() if field not in changed}
    name = words_of(changed) + (f" (with {words_of(rest)})" if rest else "")
    if trial.get("shape"):
        name += f" at {trial['shape']}"
    noise = f"±{trial['floor']:.1%}"
    figures = f"{_interval(trial):18}{noise:>6}  {trial['first']:,}-{trial['last']:,}"
    figures += " kept" if trial["chosen"] == "b" else " not kept"
    lines = wrap(name, _WIDTH - 2)
    if len(lines) == 1 and len(name) < _NAME:
        yield f"  {name:{_NAME}}{figures}"
        return
    yield from (f"  {line}" for line in lines)
    yield f"  {'':{_NAME}}{figures}"


def _interval(trial: Mapping[str, Any]) -> str:
    return f"{trial['ratio']:.2f}x [{trial['low']:.2f},{trial['high']:.2f}]"


def _ratio(trial: Mapping[str, Any]) -> str:
    return f"{_interval(trial)} (A/A ±{trial['floor']:.1%})"


def _graph(found: Mapping[str, Any]) -> str:
    words = f"forward pass of {counted(found['samples'], 'sample')} as one compiled graph: "
    if found["chosen"] == "b":
        took = duration(found["compile_s"])
        made = (
            f"compiled in {took} while evaluation went on"
            if found["compile_s"]
            else "from the cache"
        )
        words += f"{_ratio(found)} as fast, kept; {made}"
    else:
        words += f"not used: {found['why']}"
    if found["lost_s"]:
        words += (
            "; tracing, and calls that were slower during compilation, cost "
            f"{duration(found['lost_s'])}"
        )
    return words


def _captured(found: Mapping[str, Any]) -> str:
    cost = duration(found["cost_s"] + found["traced_s"])
    beside = f"during steps {found['first']:,}-{found['last']:,}, which cost them {cost}"
    if not found["is_there"]:
        return (
            f"the whole step as one graph: given up after {duration(found['compile_s'])} {beside}"
        )
    took = duration(found["compile_s"])
    how = f"compiled in {took} {beside}" if found["compile_s"] else "compiled by an earlier run"
    return f"the whole step as one graph: {how}"


def _spans(spans: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    ranges: dict[str, list[tuple[int, int]]] = {}
    for span in spans:
        ranges.setdefault(words_of(span["settings"]), []).append((span["first"], span["last"]))
    for words, value in ranges.items():
        steps = sum(last - first + 1 for first, last in value)
        # The last range is always shown: the run ended with these settings.
        shown = value if len(value) <= _MOST_SPANS else [*value[: _MOST_SPANS - 1], value[-1]]
        listed = [f"{a:,}" if a == b else f"{a:,}-{b:,}" for a, b in shown]
        if len(shown) < len(value):
            listed.insert(-1, "…")
        yield from _wrapped(f"{words}: {counted(steps, 'step')} ({', '.join(listed)})", 4)


def _wrapped(text: str, indent: int = 0) -> list[str]:
    return wrap(
        text, _WIDTH, initial_indent=" " * indent, subsequent_indent=" " * (indent or 2)
    ) or [""]


def _bar(share: float, full: str, empty: str) -> str:
    filled = round(_BAR * share)
    return full * filled + empty * (_BAR - filled)


def _ms(seconds: float) -> str:
    return f"{rounded(seconds * 1e3)} ms"
