"""Settings of torch's backends in a script."""

from __future__ import annotations

from typing import Any

from flatout.cures.steps import ScriptSteps


def set_matmul_precision(torch: Any, steps: ScriptSteps) -> None:
    """Set the precision of fp32 matrix products."""
    precision = steps.asked["compute.matmul_precision"]
    torch.set_float32_matmul_precision(precision)
    steps.took("compute.matmul_precision", f"matmul {precision}")


def benchmark_cudnn(torch: Any, steps: ScriptSteps) -> None:
    """Let cuDNN try its kernels for each shape."""
    if torch.backends.cudnn.is_available():
        torch.backends.cudnn.benchmark = True
        steps.took("script.cudnn_benchmark", "cuDNN benchmark")
    else:
        steps.leave("script.cudnn_benchmark", "there is no cuDNN here")
