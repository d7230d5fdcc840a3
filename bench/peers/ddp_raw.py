"""The best loop of two ranks that one writes by hand: DistributedDataParallel, Adam fused."""

from __future__ import annotations

import os
import sys

import ddp_job
import ddp_torch
import torch
import torch.distributed as dist
from stamps import Stamps, report
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    arguments = ddp_job.arguments()
    torch.set_num_threads(ddp_job.THREADS)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if arguments.bound:
        cpus = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cpus[rank * len(cpus) // ddp_job.RANKS]})
    inputs, labels = ddp_torch.tensors(arguments.samples)
    plain = ddp_torch.model()
    model = DistributedDataParallel(plain, gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=ddp_job.LEARNING_RATE, fused=True)

    own = ddp_job.BATCH // ddp_job.RANKS
    stamps = Stamps()
    order = torch.Generator().manual_seed(0)
    for _ in range(1 + arguments.epochs):
        for batch in torch.randperm(len(inputs), generator=order).split(ddp_job.BATCH):
            index = batch[rank * own : (rank + 1) * own]
            logits = model(inputs.index_select(0, index))
            loss = functional.cross_entropy(logits, labels.index_select(0, index))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        stamps.mark()

    if rank == 0:
        steps = len(inputs) // ddp_job.BATCH
        accuracy = ddp_torch.accuracy(plain, inputs, labels)
        report(arguments.out, stamps, steps=steps, accuracy=accuracy)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if ddp_job.is_rank():
        main()
    else:
        sys.exit(ddp_job.start_ranks())
