"""Check for language models that read the next token, which they are to predict."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import at
from flatout.doctor.finding import Finding
from flatout.observe import Observation

_LOOKED = 3
"""Number of steps after which the model has been tested."""
_SHARED = ("DataParallel", "FullyShardedDataParallel")


@check(hooks=True)
def look(observation: Observation) -> Findings:
    """Report models whose output changes with the token that it is to predict."""
    if observation.steps < _LOOKED:
        raise NoSignal("too few steps were observed to call a model again")
    shared = {model.wrapper for model in observation.models} & {*_SHARED}
    if shared:
        raise NoSignal(
            f"a model in {min(shared)} is not called again: its parts are on several devices"
        )
    for seen in observation.seen_ahead:
        name = seen.kind.rpartition(".")[2]
        layer = f": it begins in {seen.layer} ({seen.layer_kind})" if seen.layer else ""
        yield Finding(
            kind="danger",
            what=f"{name}'s output at position {seen.at} of {seen.length} changes when token "
            f"{seen.at + 1} does, the token that it has to predict{layer}; all "
            f"{seen.targets:,} targets compared are its input, shifted by one",
            do="mask later tokens, as by is_causal=True or a mask of -inf above the diagonal; "
            "recurrent layers in one direction, convolutions padded on the left only",
            where=at(seen.site),
            parity="changes learning",
        )
