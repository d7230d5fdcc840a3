"""Plain PyTorch as the tutorials write it: DataLoader over a TensorDataset.

Adam is fused here too: what is compared is the loop around the step, not the optimizer.
"""

from __future__ import annotations

import mlp_job
import mlp_torch
import torch
from stamps import Stamps, report
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    arguments = mlp_job.arguments()
    torch.set_num_threads(mlp_job.THREADS)
    inputs, labels = mlp_torch.tensors(arguments.samples)
    loader = DataLoader(TensorDataset(inputs, labels), batch_size=mlp_job.BATCH, shuffle=True)
    model = mlp_torch.model()
    optimizer = torch.optim.Adam(model.parameters(), lr=mlp_job.LEARNING_RATE, fused=True)

    stamps = Stamps()
    for _ in range(1 + arguments.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        stamps.mark()

    accuracy = mlp_torch.accuracy(model, inputs, labels)
    report(arguments.out, stamps, steps=len(loader), accuracy=accuracy)


if __name__ == "__main__":
    main()
