"""Check for gradients that are clipped too late or too early."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import calls
from flatout.doctor.finding import Finding, Kind
from flatout.observe import Call, Observation


@check()
def look(observation: Observation) -> Findings:
    """Report clipping after the step, or while a scaler has the gradients multiplied."""
    clips = calls(observation, "clip")
    if clips and not any(optimizer.backwards for optimizer in observation.optimizers):
        raise NoSignal("gradients are not made by backward()")
    for call in clips:
        norm = call.detail.get("norm")
        words = "" if norm is None else f"; their norm was {norm:,.4g}"
        if call.detail.get("is_late"):
            yield _finding(
                call,
                "gradients are clipped after the step has used them, which changes nothing" + words,
                "clip between backward() and step()",
            )
        elif (scale := call.detail.get("scale") or 1.0) > 1:
            yield _finding(
                call,
                f"gradients are clipped to {call.detail['limit']:g} while the scaler has them "
                f"multiplied by {scale:,.0f}{words}: nearly nothing is left of them",
                "scaler.unscale_(optimizer) before the clipping",
            )
        elif call.detail.get("is_scaler_off"):
            yield _finding(
                call,
                "gradients are clipped before the scaler has divided them; it is off here, and "
                "where it is on, as on a GPU, nearly nothing would be left of them",
                "scaler.unscale_(optimizer) before the clipping",
                "note",
            )


def _finding(call: Call, what: str, do: str, kind: Kind = "danger") -> Finding:
    return Finding(kind=kind, what=what, do=do, where=str(call.site), parity="changes learning")
