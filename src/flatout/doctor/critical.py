"""The critical lane: the part of a step that takes most of the time, explained in words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from flatout.doctor.checks.signals import HUNGRY, busy_share, is_gpu, ms, whole_ms
from flatout.doctor.taken_out import without
from flatout.measure import LANES, STEP_LANES
from flatout.observe import Call, Line, Loader, Observation, Site

_TOGETHER = (
    ("input",),
    ("copy",),
    ("forward", "backward"),
    ("sync",),
    ("optimizer",),
    ("host",),
    ("evaluation",),
    ("saving",),
    ("gc",),
    ("idle",),
)
"""Lanes whose times are added up before they are compared: forward and backward are one entry."""

_MUCH = 0.2
"""Smallest share of a lane's time with which a line is named as its cause."""

_LIMIT = 0.75
"""Share of a step in which the GPU has to be busy so that the GPU counts as the limit."""

BETWEEN = ("evaluation", "saving")
"""Lanes whose time lies between the steps."""

_KERNEL = 32
"""Maximum number of printed letters of a kernel's name."""

_OF_TEMPLATE = re.compile(r"[Kk]ernel\d?|device_kernel")
"""Kernel names that all templates of a library share, and that hence identify no kernel."""

_ONCE, _ALL_OF_IT, _FEWEST = 0.5, 1.05, 20
"""Limits for a single long step, such as one with an import, that is left out of Python's time.

The excess of the step has to lie between the shares _ONCE and _ALL_OF_IT of the time of Python.
_FEWEST: minimum number of steps for that comparison. An excess above _ALL_OF_IT was not spent in
Python.
"""


@dataclass(frozen=True)
class Critical:
    """The part of the steps that takes the most time.

    Attributes:
        lanes: names of the lanes in measure.LANES.
        ms: milliseconds per step in these lanes.
        share: share of the time of all lanes, including the lanes between steps.
        words: description of the lanes, and the duration of steps without them if measured.
        where: file:line of the user's code; "" if unknown.
        rank: the rank that the other ranks wait for; None if all ranks are alike.
    """

    lanes: tuple[str, ...]
    ms: float
    share: float
    words: str
    where: str = ""
    rank: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def critical(ranks: Sequence[Observation]) -> Critical | None:
    """Return the part of the steps that takes the most time; None if no lane was measured."""
    if len(ranks) == 1 and (limit := _of_gpu(ranks[0])) is not None:
        return limit
    slowest = _straggler(ranks)
    if slowest is not None:
        return _of_straggler(slowest, [rank for rank in ranks if rank is not slowest])
    lanes = {name: fmean(_ms(rank, name) for rank in ranks) for name in LANES} if ranks else {}
    once = max(map(_once, ranks), default=(0.0, ""))
    if lanes:
        lanes["host"] -= min(once[0], lanes["host"])
    whole = sum(lanes.values())
    if not whole:
        return None
    largest = max(_TOGETHER, key=lambda names: sum(lanes[name] for name in names))
    taken = sum(lanes[name] for name in largest)
    most = max(ranks, key=lambda rank: _sum(rank, largest))
    words, site = _explained(largest, most)
    words += _gpu_waits(largest, most) + without(largest, most) + once[1]
    return Critical(largest, taken, taken / whole, words, str(site or ""))


def _of_gpu(rank: Observation) -> Critical | None:
    time = rank.device_time
    busy = busy_share(rank)
    if (
        time is None
        or busy is None
        or busy < _LIMIT
        or _sum(rank, BETWEEN) > _sum(rank, STEP_LANES)
    ):
        return None
    step = whole_ms(rank)
    names = [lane for lane, ms_ in time.lanes_ms.items() if ms_]
    lanes = tuple(sorted(names, key=lambda lane: -time.lanes_ms[lane])) or ("forward",)
    dearest = [f" ({ms(took)} in {_kernel(name)})" for name, took in time.kernels[:1]]
    words = (
        f"the GPU computes for {busy:.0%} of a step of {ms(step)}{''.join(dearest)}: it is the "
        "limit, and where the host takes long it waits for the GPU"
    )
    site = next((model.site for model in rank.models if model.site is not None), None)
    return Critical(lanes, busy * step, busy, words, str(site or ""))


def _kernel(name: str) -> str:
    plain = re.sub(r"<.*|\(.*", "", name.removeprefix("void ")).rpartition("::")[2]
    if _OF_TEMPLATE.fullmatch(plain):  # the first template argument distinguishes such kernels
        plain = re.split(r"[<>,( ]", name.partition("<")[2])[0].rpartition("::")[2]
    return plain[:_KERNEL] + ("..." if len(plain) > _KERNEL else "")


def _once(rank: Observation) -> tuple[float, str]:
    steps = rank.step_ms[1:]  # the first step does one-time setup
    if len(steps) < _FEWEST:
        return 0.0, ""
    longest = max(steps)
    usual = median(steps)
    beyond = (longest - usual) / rank.steps
    others = sum(max(0.0, step - usual) for step in steps) / rank.steps - beyond
    pythons = _sum(rank, ("host", "gc"))  # gc too: an import creates many objects to traverse
    is_pythons = _ONCE * pythons <= beyond <= _ALL_OF_IT * pythons
    if not (pythons and is_pythons) or beyond < others:
        return 0.0, ""
    return beyond, f"; a single step, which is not counted in that, took {ms(longest)}"


def _straggler(ranks: Sequence[Observation]) -> Observation | None:
    if len(ranks) < 2 or any(rank.lanes_ms.get("sync") is None for rank in ranks):
        return None
    least, most = (f(ranks, key=lambda rank: _ms(rank, "sync")) for f in (min, max))
    waited = _ms(most, "sync") - _ms(least, "sync")
    return least if waited >= HUNGRY * _sum(most, LANES) else None


def _of_straggler(slowest: Observation, others: Sequence[Observation]) -> Critical:
    def excess(names: tuple[str, ...]) -> float:
        return _sum(slowest, names) - fmean(_sum(rank, names) for rank in others)

    lanes = max((names for names in _TOGETHER if names != ("sync",)), key=excess)
    words, site = _explained(lanes, slowest)
    more = f"; there that takes {ms(excess(lanes))} more than elsewhere"
    return Critical(
        lanes,
        _sum(slowest, lanes),
        _sum(slowest, lanes) / max(_sum(slowest, LANES), 1e-9),
        f"the other ranks wait for rank {slowest.rank}: {words}{more}",
        str(site or ""),
        slowest.rank,
    )


def _gpu_waits(lanes: tuple[str, ...], rank: Observation) -> str:
    time = rank.device_time
    if time is None:
        return ""
    if lanes == ("copy",) and time.to_device_ms < 0.5 * _sum(rank, lanes):
        return f"; copying takes the GPU {ms(time.to_device_ms)}, the rest is the wait for its turn"
    return f"; it computes for {busy_share(rank) or 0:.0%} of a step of {ms(whole_ms(rank))}"


def _explained(lanes: tuple[str, ...], rank: Observation) -> tuple[str, Site | None]:
    device = "GPU" if is_gpu(rank) else "model"
    if lanes == ("input",):
        return _input(device, rank)
    if lanes == ("host",):
        return _host(rank)
    hot = dearest_line(rank, lanes)
    waits = _GPU_WORDS.get(lanes) if rank.device_time is not None else None
    if waits is not None:
        return waits, hot.site if hot is not None else _begins(lanes, rank)
    if hot is not None and lanes == ("forward", "backward"):
        named = f": {hot.within}" if hot.within else ""
        return _WORDS[lanes].format(device=device) + named, hot.site
    if hot is not None and lanes in (("saving",), ("evaluation",)):
        return _WORDS[lanes].format(device=device), hot.site
    return _WORDS[lanes].format(device=device), _begins(lanes, rank)


def _begins(lanes: tuple[str, ...], rank: Observation) -> Site | None:
    if lanes == ("saving",):
        return next((call.site for call in rank.calls if call.kind == "save"), None)
    if lanes == ("optimizer",):
        return next((optimizer.site for optimizer in rank.optimizers), None)
    for model in rank.models:
        if lanes == ("forward", "backward"):
            return model.site
        if lanes == ("evaluation",):
            return model.evaluated_with_grad or model.evaluated_in_train_mode
    return None


_WORDS = {
    ("copy",): "batches on their way to the {device} take the largest part",
    ("forward", "backward"): "the model's own computing takes the largest part",
    ("sync",): "the sum of gradients over the ranks takes the largest part",
    ("optimizer",): "updating the parameters takes the largest part",
    ("evaluation",): "evaluation takes the largest part",
    ("saving",): "writing checkpoints takes the largest part",
    ("gc",): "Python's garbage collection takes the largest part",
    ("idle",): "most time passes outside of the observed parts of a step",
}

_GPU_WORDS = {
    ("forward", "backward"): "the GPU waits for the host, which takes longer to call the "
    "operators of forward and backward than the GPU to run them",
    ("optimizer",): "the GPU waits for the host, which takes longer to call the operators of the "
    "optimizer than the GPU to run them",
}

_PARTS = {
    "read": "reading files",
    "decode": "decoding",
    "transform": "transforms",
    "collate": "putting batches together",
}


def _input(device: str, rank: Observation) -> tuple[str, Site | None]:
    words = f"the {device} waits for input"
    trained = [loader for loader in rank.loaders if loader.in_training]
    if not trained:
        return words, None
    loader: Loader = max(trained, key=lambda value: (value.wait_ms or 0.0) * value.batches)
    part = max(loader.lanes_ms, key=lambda name: loader.lanes_ms[name], default="")
    where = loader.hot[0][0] if loader.hot else loader.dataset_site or loader.site
    return words + (f": {_PARTS[part]}" if part in _PARTS else ""), where


def dearest_line(rank: Observation, lanes: Sequence[str]) -> Line | None:
    """Return the user's line that takes most of the time of the first lane in `lanes`.

    None if no line takes much of that lane. Lanes forward and backward give a line of forward,
    since backward is a single call.
    """
    own = lanes[:1]

    def taken(line: Line) -> float:
        return sum(line.lanes_ms.get(name, 0.0) for name in own)

    most = max(rank.lines, key=taken, default=None)
    return most if most is not None and taken(most) >= _MUCH * _sum(rank, own) else None


def _host(rank: Observation) -> tuple[str, Site | None]:
    hot = dearest_line(rank, ("host",))
    words = "Python between the steps takes the largest part"
    if rank.device_time is not None:
        words = "the GPU waits for Python between the steps"
    if hot is not None:
        named = f"{hot.trainer}'s {hot.within}" if hot.trainer else hot.words or "this line"
        return f"{words}: {named}, {ms(hot.lanes_ms['host'])} of it", hot.site
    timed: list[Call] = [call for call in rank.calls if call.seconds and call.kind != "backward"]
    dearest = max(timed, key=lambda call: call.seconds or 0.0, default=None)
    if dearest is None:
        return words, None
    cost = 1e3 * (dearest.seconds or 0.0) / max(1, rank.steps)
    # One of many small calls does not explain the time of the lane.
    if cost < HUNGRY * _ms(rank, "host"):
        return words, None
    return f"{words}: {dearest.kind}, {ms(cost)} of it", dearest.site


def _ms(rank: Observation, name: str) -> float:
    return rank.lanes_ms.get(name) or 0.0


def _sum(rank: Observation, names: Sequence[str]) -> float:
    return sum(_ms(rank, name) for name in names)
