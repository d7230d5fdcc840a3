"""Check for evaluation that builds graphs which no backward will use."""

from __future__ import annotations

from flatout.doctor.checks.check import check
from flatout.doctor.checks.signals import models, ms
from flatout.doctor.edits import evaluation
from flatout.doctor.finding import Finding
from flatout.observe import Model, Observation


@check(edit=evaluation.no_grad, lane="evaluation")
def look(observation: Observation) -> list[Finding]:
    """Report models that are evaluated with gradients enabled."""
    # Evaluations in a shortened epoch are observed, but not timed.
    evaluation = observation.lanes_ms.get("evaluation") or None
    return [
        _finding(model, evaluation) for model in models(observation) if model.evaluated_with_grad
    ]


def _finding(model: Model, evaluation: float | None) -> Finding:
    takes = "" if not evaluation else f"; evaluation takes {ms(evaluation)} per training step"
    return Finding(
        kind="slow",
        what="evaluation runs with gradients enabled: it keeps every activation for a backward "
        f"that never comes{takes}",
        do="with torch.inference_mode(): around the evaluation",
        where=str(model.evaluated_with_grad),
        cost_ms=evaluation,
        parity="bit-identical",
        recipe={"script.evaluation": "no_grad"},
    )
