"""Check for one GPU of the job that holds much more memory than the job's other GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from flatout.doctor.checks.check import Findings, NoSignal, rank_check
from flatout.doctor.finding import Finding
from flatout.observe import Observation

_MUCH_MORE = 1.5
"""Ratio of the fullest GPU's memory to the other GPUs' from which on it limits the batch size."""

_LEAST_MB = 512
"""Minimum megabytes that the fullest GPU holds more than the other GPUs."""


@rank_check()
def look(observations: Sequence[Observation]) -> Findings:
    """Report that the sums of all ranks' peaks differ much between GPUs."""
    used_mb: dict[str, dict[int, float]] = {}
    for rank in observations:
        if rank.gpu_memory_mb is None:
            raise NoSignal("torch computes on no GPU here")
        for gpu, mb in rank.gpu_memory_mb.items():
            if mb:
                used_mb.setdefault(gpu, {})[rank.rank] = mb
    if len(used_mb) < 2:
        raise NoSignal("the job computes on fewer than two GPUs")
    sums = {gpu: sum(of_ranks.values()) for gpu, of_ranks in used_mb.items()}
    fullest = max(sums, key=lambda gpu: sums[gpu])
    usual = median(mb for gpu, mb in sums.items() if gpu != fullest)
    if sums[fullest] < max(_MUCH_MORE * usual, usual + _LEAST_MB):
        return
    ranks = used_mb[fullest]
    by = f" by ranks {', '.join(map(str, ranks))}" if len(ranks) > 1 else ""
    calls = [
        call.site for rank in observations for call in rank.calls if call.kind == "data_parallel"
    ]
    yield Finding(
        kind="note",
        what=f"GPU {fullest} holds up to {sums[fullest]:,.0f} MiB{by}, the others "
        f"{usual:,.0f} MiB: it decides how large a batch can be",
        do=_do(len(ranks) > 1),
        where=str(calls[0]) if calls else "",
        parity="rounding",
    )


def _do(is_shared: bool) -> str:
    if is_shared:
        return (
            "torch.cuda.set_device(local_rank) before the first tensor, and "
            'torch.load(..., map_location="cpu"): files remember the GPU that they were saved from'
        )
    return (
        "gather no outputs or losses of all on one device; share out the layers by their memory; "
        "DistributedDataParallel in place of DataParallel"
    )
