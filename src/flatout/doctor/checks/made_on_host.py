"""Check for tensors that are made on the host in each step and copied to the GPU on that line."""

from __future__ import annotations

import re

from flatout.doctor.checks.check import Findings, check
from flatout.doctor.checks.signals import (
    calls,
    cost_ms,
    is_each_step,
    is_gpu,
    kind_of,
    ms,
    returned_ms,
)
from flatout.doctor.edits import devices
from flatout.doctor.finding import Finding
from flatout.observe import Call, Observation

_CONSTANT = ("zeros", "ones", "full", "arange", "eye", "empty", "linspace")
_DRAWN = ("rand", "randn", "randint", "randperm")
_MAKES = re.compile(rf"\btorch\.({'|'.join((*_CONSTANT, *_DRAWN))})\(.*\)\.(to|cuda)\(")


@check(edit=devices.on_device)
def look(observation: Observation) -> Findings:
    """Report lines that make and copy a tensor in most steps."""
    transfers = calls(observation, "to_device")
    if not is_gpu(observation):
        return
    for call in transfers:
        made = _MAKES.search(call.site.code)
        if made is not None and is_each_step(observation, call):
            yield _finding(observation, call, made[1], made[0])


def _finding(observation: Observation, call: Call, made: str, words: str) -> Finding:
    own = cost_ms(observation, call)
    cost = returned_ms(observation, own)
    takes = "" if own is None else f" ({ms(own)} for the copy)"
    return Finding(
        kind=kind_of(observation, cost),
        what=f"torch.{made} makes a tensor on the host in each step, which is then copied to the "
        f"GPU{takes}: the host waits there for all that the GPU still has to do",
        do=f"torch.{made}(..., device=device)",
        where=str(call.site),
        cost_ms=cost,
        parity="redrawn" if made in _DRAWN else "bit-identical",
    )
