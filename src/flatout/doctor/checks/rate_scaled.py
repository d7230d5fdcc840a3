"""Check for a learning rate that is multiplied by the number of ranks, without warm-up."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from flatout.doctor.checks.check import NoSignal, check
from flatout.doctor.checks.signals import at, calls, step_ms
from flatout.doctor.finding import Finding
from flatout.observe import Call, Observation, Optimizer

_RANKS = re.compile(r"world_?size|^ranks$|^n?(um)?_?(ranks|gpus|replicas|processes|devices)$", re.I)
"""Names that scripts use for the number of ranks."""

_ADAPTIVE = ("ada", "rmsprop", "lamb", "lion")
"""Parts of the names of optimizers for which theory and experiments favor the square root."""

_RISES = 1.05
"""Ratio of a later rate to the first step's rate from which on there is warm-up."""


@check()
def look(observation: Observation) -> list[Finding]:
    """Report a multiplied rate in the line that makes the optimizer, full from the first step.

    No run can show that a rate should have been multiplied, and was not.
    """
    step_ms(observation)
    if observation.world_size == 1:
        return []
    made = calls(observation, "optimizer")
    if not made or not observation.optimizers:
        raise NoSignal("the line that makes the optimizer was not observed")
    multiplied = [call for call in made if _multiplies(call)]
    if not multiplied:
        return []
    if any(not optimizer.rates for optimizer in observation.optimizers):
        raise NoSignal("the learning rate was not observed")
    optimizer = observation.optimizers[0]
    if _warms_up(optimizer):
        return []
    return [_finding(observation, optimizer, call) for call in multiplied]


def _multiplies(call: Call) -> bool:
    rate = _rate_in(call.site.code)
    words = [word for part in ast.walk(rate) for word in _words(part)] if rate else []
    operators = [type(part.op) for part in ast.walk(rate) if isinstance(part, ast.BinOp)]
    if any(_RANKS.search(word) for word in words):
        return ast.Mult in operators and ast.Pow not in operators and "sqrt" not in words
    if words:
        raise NoSignal("where the learning rate comes from is not in the optimizer's line")
    return False


def _rate_in(line: str) -> ast.expr:
    try:
        tree = ast.parse(line.strip())
    except SyntaxError:
        raise NoSignal("the call that makes the optimizer is not in one line") from None
    for part in ast.walk(tree):
        if isinstance(part, ast.Call):
            for keyword in part.keywords:
                if keyword.arg == "lr":
                    return keyword.value
                if keyword.arg is None:
                    raise NoSignal("the optimizer's options come from elsewhere")
    call = next((part for part in ast.walk(tree) if isinstance(part, ast.Call)), None)
    return call.args[1] if call is not None and len(call.args) > 1 else ast.Constant(None)


def _words(part: ast.AST) -> Iterator[str]:
    if isinstance(part, ast.Name):
        yield part.id
    elif isinstance(part, ast.Attribute):
        yield part.attr
    elif isinstance(part, ast.Constant) and isinstance(part.value, str):
        yield part.value


def _warms_up(optimizer: Optimizer) -> bool:
    first = optimizer.rates[0][1]
    most = max(rate for _, rate in optimizer.rates)
    target = optimizer.first_target or first
    return max(most, target) > _RISES * first


def _finding(observation: Observation, optimizer: Optimizer, call: Call) -> Finding:
    name = optimizer.kind.rpartition(".")[2]
    is_adaptive = any(word in name.lower() for word in _ADAPTIVE)
    rule = f"; the linear rule was found for SGD, not for {name}" if is_adaptive else ""
    root = "multiply by the square root, and " if is_adaptive else ""
    return Finding(
        kind="note",
        what=f"the learning rate is multiplied by {observation.world_size} ranks, and is "
        f"{optimizer.rates[0][1]:g} from the first step on{rule}",
        do=f"{root}raise it from the single rank's over the first epochs "
        "(torch.optim.lr_scheduler.LinearLR); compare the first epochs' losses",
        where=at(call.site),
        parity="changes learning",
    )
