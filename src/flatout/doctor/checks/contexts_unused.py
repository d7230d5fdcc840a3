"""Check for contexts on GPUs that the process does not use."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.finding import Finding
from flatout.observe import Observation
from flatout.words import counted


@check()
def look(observation: Observation) -> Findings:
    """Report contexts on GPUs where torch has never allocated memory."""
    if observation.gpu_memory_mb is None:
        raise NoSignal("torch computes on no GPU here")
    empty = [gpu for gpu, megabytes in observation.gpu_memory_mb.items() if not megabytes]
    if not empty:
        return
    counts = [call.site for call in observation.calls if call.kind == "device_count"]
    yield Finding(
        kind="note",
        what=f"the process has a context on {counted(len(empty), 'GPU')} where it computes "
        "nothing: each takes some hundred MiB there and time at the start, and workers that "
        "are forked from it cannot use CUDA",
        do="count devices by NVML (flatout devices; PYTORCH_NVML_BASED_CUDA_CHECK=1), and "
        "torch.cuda.set_device before anything else; or show each rank its own GPU by "
        "CUDA_VISIBLE_DEVICES",
        where=str(counts[0]) if counts else "",
        parity="bit-identical",
    )
