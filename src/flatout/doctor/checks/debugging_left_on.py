"""What was switched on for debugging, for all of torch, is still on."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import calls, lane
from flatout.doctor.finding import Finding
from flatout.observe import Observation

_WORDS = {
    "detect_anomaly": (
        "anomaly detection is on: each operator of forward keeps its lines, and each of backward "
        "is searched for NaN",
        "torch.autograd.set_detect_anomaly(False), and on again to find a NaN",
    ),
    "deterministic_algorithms": (
        "deterministic algorithms are on: some operators take slower ones",
        "torch.use_deterministic_algorithms(False), unless runs have to be equal",
    ),
    "float64": (
        "new tensors are float64 by default: twice the memory, and half the speed on a CPU or less",
        "torch.set_default_dtype(torch.float32), unless you need the digits",
    ),
}


@check()
def look(observation: Observation) -> Findings:
    """What was on when backward was called first, with the line that switched it on."""
    if observation.switched_on is None:
        raise NoSignal("no backward pass was seen")
    sites = {call.detail.get("name"): call.site for call in calls(observation, "switch")}
    for name in observation.switched_on:
        what, do = _WORDS[name]
        is_slow = name == "detect_anomaly"
        yield Finding(
            kind="slow" if is_slow else "note",
            what=what,
            do=do,
            where=str(sites.get(name, "")),
            cost_ms=lane(observation, "forward", "backward") if is_slow else None,
            parity="bit-identical" if is_slow else "rounding",
        )
