"""Plain PyTorch as the tutorials write it: DataLoader over a TensorDataset; autocast for bf16."""

from __future__ import annotations

import convnet_job
import convnet_torch
import torch
from stamps import Stamps, report
from torch.nn import functional
from torch.utils.data import DataLoader


def main() -> None:
    arguments = convnet_job.parser().parse_args()
    torch.set_num_threads(arguments.threads)
    train, held_out = convnet_torch.load(arguments.images)
    model = convnet_torch.model(arguments.seed)
    loader = DataLoader(train, batch_size=convnet_job.BATCH, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=convnet_job.LEARNING_RATE)
    bf16 = arguments.precision == "bf16"

    stamps = Stamps()
    for _ in range(1 + arguments.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        stamps.mark()

    accuracy = convnet_torch.accuracy(model, held_out)
    report(arguments.out, stamps, steps=len(loader), accuracy=accuracy)


if __name__ == "__main__":
    main()
