"""Check for values fetched from the device in each step: .item(), .tolist(), .cpu(), .numpy()."""

from __future__ import annotations

import re

from flatout.doctor.checks.check import check
from flatout.doctor.checks.signals import (
    calls,
    cost_ms,
    is_each_step,
    is_gpu,
    kind_of,
    ms,
    returned_ms,
)
from flatout.doctor.edits import tensors
from flatout.doctor.finding import Finding
from flatout.observe import Call, Observation

_KINDS = ("item", "tolist", "cpu", "numpy")

_DISTRIBUTION = re.compile(
    r"\.i?cdf\(|\.log_prob\(|\b(Normal|LogNormal|Categorical|Bernoulli|Beta|Gamma|Uniform|Laplace"
    r"|Multinomial|Dirichlet|MultivariateNormal|Independent|TransformedDistribution)\("
)
"""Calls of torch.distributions that validate their arguments, unless validate_args is False."""


@check(edit=tensors.read_later, lane="item")
def look(observation: Observation) -> list[Finding]:
    """Report lines that wait for the device in most steps."""
    return [
        _finding(
            observation,
            call,
            cost_ms(observation, call),
            returned_ms(observation, cost_ms(observation, call)),
        )
        for call in calls(observation, *_KINDS)
        if is_each_step(observation, call)
    ]


def _finding(
    observation: Observation, call: Call, own: float | None, cost: float | None
) -> Finding:
    often = call.count / observation.steps
    times = f"{often:.0f} times" if often >= 1.5 else "once"
    waits = f" and waits {ms(own)}" if own is not None else ""
    if seen := call.detail.get("watched_steps"):
        waits += f" (timed in {seen} of {observation.steps:,} steps)"
    do = "keep sums as tensors on the device, and read them every N steps"
    if call.detail.get("by") == "__bool__" and call.site and _DISTRIBUTION.search(call.site.code):
        do = (
            "torch.distributions.Distribution.set_default_validate_args(False): the validation "
            "of arguments makes these calls"
        )
    return Finding(
        kind=kind_of(observation, cost),
        what=f".{call.kind}() is called {times} in each step{waits}: the host waits until the "
        "device has finished all earlier work",
        do=do,
        where=str(call.site),
        cost_ms=cost,
        parity="bit-identical",
        recipe={"script.host_syncs": "deferred"}
        if is_gpu(observation) and call.kind == "item"
        else {},
    )
