"""Reports how long a fit waited for its input, and suggests a remedy."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from flatout.data import (
    Cache,
    DatasetSource,
    Explanation,
    IterableSource,
    Map,
    Pipeline,
    TunedDatasetSource,
    name_of,
    only,
    stages,
)
from flatout.words import counted

# A wait is reported if it reaches both limits. _TOLD: fraction of the time. _TOLD_S: seconds.
_TOLD, _TOLD_S = 0.1, 1.0


def waiting_words(source: Any, lanes: Mapping[str, float], steps: int, epochs: int) -> str | None:
    """Return a line about the wait for input and a remedy; None if the wait was short."""
    if lanes.get("input", 0.0) * steps < 1e3 * _TOLD_S:
        return None
    share = lanes["input"] / sum(lanes.values())
    if not isinstance(source, Pipeline):
        return _words(share, _advice(source)) if share > _TOLD else None
    result = source.explanation()
    share = share if result.waited is None else result.waited
    return _words(share, *_of_pipeline(source, result, epochs)) if share > _TOLD else None


def _words(share: float, advice: str, slowest: str = "") -> str:
    most = f", most of it for {slowest}" if slowest else ""
    gain = f"without waiting, training is up to {1 / max(1 - share, 0.01):.1f} times as fast"
    words = f"input held the training back: {share:.0%} of the time was waiting{most}"
    return "; ".join([words, gain, advice]).removesuffix("; ")


def _of_pipeline(source: Pipeline, explanation: Explanation, epochs: int) -> tuple[str, str]:
    slowest = max(explanation.stages, key=explanation.stages.__getitem__, default="")
    before = takewhile(lambda stage: not isinstance(stage, stages.Batch), source.stages)
    if slowest in {f"map {name_of(stage.function)}" for stage in before if isinstance(stage, Map)}:
        advice = "it runs once per sample: a function for whole batches can come after batch()"
        return advice, slowest
    cached = only(source.stages, Cache) is not None
    is_read = slowest and not slowest.startswith(("map ", "filter ", "batch", "shuffle"))
    if is_read and epochs > 1 and not cached and source.counted:
        return "cache() keeps what is read, from the second epoch on", slowest
    return "", slowest


def _advice(source: Any) -> str:
    if isinstance(source, TunedDatasetSource):
        tried = source.tuner.trials
        more = "a __getitems__ that gives many samples at once makes them faster"
        if tried:
            return f"{more}; tried: {'; '.join(tried)}"
        return f"the run was too short to try input.workers; {more}"
    if isinstance(source, DatasetSource):
        return (
            "its samples are made one by one: a __getitems__ that gives many at once, or "
            "input.workers, makes them faster"
        )
    if isinstance(source, IterableSource):
        settled = 0 if source.reader is None else source.reader.settled
        how = "each batch is made when training asks for it"
        if settled == "thread":
            how = "one thread makes batches ahead"
        elif settled:
            how = f"{counted(settled, 'worker')} made batches ahead"
        tried = [] if source.reader is None else source.reader.trials
        return (
            f"{how}: a DataLoader with (more) workers, workers= of a PyDataset, or flatout.data "
            "makes several batches at once" + f"; tried: {'; '.join(tried)}" * bool(tried)
        )
    return ""
