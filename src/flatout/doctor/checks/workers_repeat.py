"""Check for workers of an IterableDataset that each return all samples."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import at, training_loaders
from flatout.doctor.finding import Finding
from flatout.observe import Observation


@check()
def look(observation: Observation) -> Findings:
    """Report workers with equal first batches, if the second batch of one worker differs."""
    for loader in training_loaders(observation):
        workers = loader.num_workers or 0
        if not loader.is_iterable or workers < 2:
            continue
        if len(loader.worker_batches) <= workers:
            raise NoSignal("not every worker's first batch was observed")
        first, second = loader.worker_batches[:workers], loader.worker_batches[workers]
        if len(set(first)) > 1 or second == first[0]:
            continue
        yield Finding(
            kind="danger",
            what=f"the first batches of all {workers} workers are equal: each goes through the "
            f"whole stream, so that every sample is trained on {workers} times an epoch",
            do="in __iter__ take each num_workers-th sample, from "
            "torch.utils.data.get_worker_info().id on",
            where=at(loader.dataset_site or loader.site),
            parity="changes learning",
        )
