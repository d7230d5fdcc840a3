"""Check for matrix products in full fp32 on a GPU with units for TF32."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import at, compute_ms, is_gpu, is_worth, models
from flatout.doctor.finding import Finding
from flatout.observe import Observation

_FASTER = 8.0
"""Largest ratio of peak FLOP rates, TF32 over fp32, on a GPU with TF32 units."""

_PLAIN = "highest"


@check()
def look(observation: Observation) -> Findings:
    """Report models in fp32 on a GPU whose TF32 units are unused. A CPU has none."""
    if not is_gpu(observation):
        return
    trained = models(observation)
    if observation.matmul_precision is None or observation.bf16_units is None:
        raise NoSignal("torch's precision of matrix products was not observed")
    # A GPU with units for bf16 also has units for TF32.
    if observation.matmul_precision != _PLAIN or not observation.bf16_units:
        return
    if any("16" in dtype for optimizer in observation.optimizers for dtype in optimizer.dtypes):
        return
    cost = compute_ms(observation, "forward", "backward") * (1 - 1 / _FASTER)
    if not is_worth(observation, cost):
        return
    for model in trained:
        # cuDNN's convolutions use TF32 by default.
        if not model.autocast and any("Conv" not in layer for layer in model.layers):
            yield Finding(
                kind="slow",
                what="matrix products are computed in full fp32, while this GPU has units for "
                "TF32: same range, 10 bits after the point in place of 23",
                do='torch.set_float32_matmul_precision("high")',
                where=at(model.site),
                cost_ms=cost,
                is_estimate=True,  # operations other than matrix products do not speed up
                parity="rounding",
                recipe={"compute.matmul_precision": "high"},
            )
