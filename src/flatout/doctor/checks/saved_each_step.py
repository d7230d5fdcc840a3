"""Check for checkpoints that are written in each step."""

from __future__ import annotations

from statistics import median

from flatout.doctor.checks.check import Findings, check
from flatout.doctor.checks.signals import (
    calls,
    is_each_step,
    is_worth,
    kind_of,
    ms,
    run_steps,
    whole_ms,
)
from flatout.doctor.finding import Finding
from flatout.observe import Call, Observation
from flatout.words import counted, rounded, size_words

_STEPS_OF_EPOCH = 4
"""Maximum number of steps per epoch for which a save in most steps may be a save per epoch."""

_MUCH = 1e9
"""Bytes written per hour from which on saves are reported, even if writing takes little time."""

_DO = "save once an epoch, or at the interval that you can afford to lose"


@check(lane="saving")
def look(observation: Observation) -> Findings:
    """Report lines that save in most steps, with their time and the disk space that they need."""
    for call in calls(observation, "save"):
        epochs = max(
            (loader.epochs for loader in observation.loaders if loader.in_training), default=1
        )
        if is_each_step(observation, call) and observation.steps > _STEPS_OF_EPOCH * epochs:
            yield _finding(observation, call)


def _finding(observation: Observation, call: Call) -> Finding:
    cost = None if call.seconds is None else 1e3 * call.seconds / observation.steps
    takes = "" if cost is None else f", which takes {ms(cost)} of each"
    per_step = _bytes(observation) * call.count / observation.steps
    an_hour = per_step * 3.6e6 / max(whole_ms(observation), 1e-3)
    told = f": {size_words(an_hour)} an hour" if an_hour else ""
    what = f"torch.save writes in {call.steps} of {observation.steps} steps{takes}{told}"
    in_all, free = per_step * run_steps(observation), observation.disk_free_mb
    if _are_kept(observation) and free is not None and in_all > free * 2**20:
        what += (
            f", each time another file; the run's {counted(round(run_steps(observation)), 'step')} "
            f"write {size_words(in_all)}, and {size_words(free * 2**20)} are free"
        )
        return Finding("danger", what, _DO, where=str(call.site), parity="bit-identical")
    is_small = cost is not None and not is_worth(observation, cost)
    is_told = is_small and an_hour >= _MUCH
    return Finding(
        kind="slow" if is_told else kind_of(observation, cost),
        what=what,
        do=_DO,
        where=str(call.site),
        cost_ms=cost,
        takes=f"{rounded(an_hour / 1e9, 2)} GB/h" if is_told else "",
        parity="bit-identical",
    )


def _bytes(observation: Observation) -> float:
    sizes = [saved["bytes"] for saved in observation.saved if saved["step"] and saved.get("bytes")]
    return median(sizes) if sizes else 0.0


def _are_kept(observation: Observation) -> bool:
    files = [saved for saved in observation.saved if saved["step"] and saved["path"]]
    own = {saved["path"] for saved in files if saved.get("is_there")}
    return len(files) > 1 and len(own) == len(files)
