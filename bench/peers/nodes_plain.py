"""Plain torch DistributedDataParallel, as one writes it by hand, on batches already in memory."""

from __future__ import annotations

import nodes_job
import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from flatout.data.randomness import order


def main() -> None:
    arguments = nodes_job.arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    (x, y), held_out = nodes_job.load(arguments.images)
    model = nodes_job.model()
    parallel = DistributedDataParallel(model)
    optimizer = nodes_job.optimizer(list(model.parameters()))
    until = nodes_job.UntilLoss(model, *held_out, arguments.loss)
    dist.barrier()
    until.start()
    train(x, y, rank, ranks, parallel, optimizer, until)
    if rank == 0:
        until.report(arguments.out)
    dist.barrier()
    dist.destroy_process_group()


def train(
    x: torch.Tensor,
    y: torch.Tensor,
    rank: int,
    ranks: int,
    parallel: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    until: nodes_job.UntilLoss,
) -> None:
    steps = 0
    for epoch in range(nodes_job.MOST_EPOCHS):
        in_order = torch.from_numpy(order(len(x), 0, epoch, True))
        for batch in in_order.split(nodes_job.BATCH):
            own = batch.tensor_split(ranks)[rank]
            optimizer.zero_grad()
            functional.cross_entropy(parallel(x[own]), y[own]).backward()
            optimizer.step()
            steps += 1
            if steps % nodes_job.EVERY == 0 and until.reached():
                return


if __name__ == "__main__":
    main()
