"""Each worker of an IterableDataset gives all samples: each comes as often as there are workers."""

from __future__ import annotations

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import at, training_loaders
from flatout.doctor.finding import Finding
from flatout.observe import Observation


@check()
def look(observation: Observation) -> Findings:
    """Whether the first batches of all workers are equal, and the second of one differs."""
    for loader in training_loaders(observation):
        workers = loader.num_workers or 0
        if not loader.is_iterable or workers < 2:
            continue
        if len(loader.worker_batches) <= workers:
            raise NoSignal("not every worker's first batch was seen")
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
