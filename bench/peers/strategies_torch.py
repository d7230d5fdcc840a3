"""The loop of two ranks that one writes by hand: torch's fully_shard, Adam fused."""

from __future__ import annotations

import os
import sys

import ddp_job
import ddp_torch
import strategies_job
import torch
import torch.distributed as dist
from stamps import Stamps, report
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional


def main() -> None:
    arguments = strategies_job.arguments()
    torch.set_num_threads(ddp_job.THREADS)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if arguments.bound:
        cpus = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cpus[rank * len(cpus) // ranks]})
    inputs, labels = ddp_torch.tensors(arguments.samples)
    model = strategies_job.model()
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # the faster way for gloo
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.Adam(model.parameters(), lr=strategies_job.LEARNING_RATE, fused=True)

    own = strategies_job.BATCH // ranks
    stamps = Stamps()
    order = torch.Generator().manual_seed(0)
    for _ in range(1 + arguments.epochs):
        for batch in torch.randperm(len(inputs), generator=order).split(strategies_job.BATCH):
            index = batch[rank * own : (rank + 1) * own]
            loss = functional.cross_entropy(model(inputs[index]), labels[index], reduction="sum")
            (loss / len(batch)).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        stamps.mark()

    accuracy = ddp_torch.accuracy(model, inputs, labels)
    if rank == 0:
        steps = len(inputs) // strategies_job.BATCH
        report(arguments.out, stamps, steps=steps, accuracy=accuracy)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if ddp_job.is_rank():
        main()
    else:
        sys.exit(ddp_job.start_ranks())
