"""Plain PyTorch in fp32, with the sample order that Flatout draws from the same seed."""

from __future__ import annotations

import accuracy_job
import convnet_torch
import torch
from stamps import Stamps, report
from torch.nn import functional
from torch.utils.data import DataLoader

from flatout.data.randomness import order


def main() -> None:
    arguments = accuracy_job.arguments()
    torch.set_num_threads(arguments.threads)
    train, held_out = convnet_torch.load(arguments.images)
    model = convnet_torch.model(arguments.seed)
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = accuracy_job.schedule(len(train), arguments.epochs)(optimizer)

    stamps = Stamps()
    for epoch in range(arguments.epochs):
        in_order = order(len(train), arguments.seed, epoch).tolist()
        for x, y in DataLoader(train, batch_size=accuracy_job.BATCH, sampler=in_order):
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()
        stamps.mark()

    accuracy = convnet_torch.accuracy(model, held_out)
    steps = -(-len(train) // accuracy_job.BATCH)
    report(arguments.out, stamps, steps=steps, accuracy=accuracy)


if __name__ == "__main__":
    main()
