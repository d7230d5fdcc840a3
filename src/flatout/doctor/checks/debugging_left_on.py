"""Check for global debugging modes of torch that are still on."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import calls, kind_of, lane
from flatout.doctor.finding import Finding
from flatout.observe import Observation

_WORDS = {
    "detect_anomaly": (
        "anomaly detection is on: each operator of forward stores its stack trace, and each "
        "operator of backward is checked for NaN",
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

_SHARES = {"detect_anomaly": 1.0, "float64": 0.5}
"""Share of forward and backward that is saved without each mode; float64 moves twice the bytes."""


@check()
def look(observation: Observation) -> Findings:
    """Report modes that were on at the first backward, with the line that switched them on."""
    if observation.switched_on is None:
        raise NoSignal("no backward pass was observed")
    sites = {call.detail.get("name"): call.site for call in calls(observation, "switch")}
    for name in observation.switched_on:
        what, do = _WORDS[name]
        share = _SHARES.get(name)
        cost = None if share is None else share * lane(observation, "forward", "backward")
        yield Finding(
            kind="note" if cost is None else kind_of(observation, cost),
            what=what,
            do=do,
            where=str(sites.get(name, "")),
            cost_ms=cost,
            is_estimate=name == "float64",
            parity="bit-identical" if name == "detect_anomaly" else "rounding",
        )
