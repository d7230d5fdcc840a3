"""Accelerate on the CPU: the plain loop with model, optimizer and loader prepared; Adam fused."""

from __future__ import annotations

import mlp_job
import mlp_torch
import torch
from accelerate import Accelerator
from stamps import Stamps, report
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    arguments = mlp_job.arguments()
    torch.set_num_threads(mlp_job.THREADS)
    inputs, labels = mlp_torch.tensors(arguments.samples)
    plain_model = mlp_torch.model()
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(
        plain_model,
        torch.optim.Adam(plain_model.parameters(), lr=mlp_job.LEARNING_RATE, fused=True),
        DataLoader(TensorDataset(inputs, labels), batch_size=mlp_job.BATCH, shuffle=True),
    )

    stamps = Stamps()
    for _ in range(1 + arguments.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(functional.cross_entropy(model(x), y))
            optimizer.step()
        stamps.mark()

    accuracy = mlp_torch.accuracy(plain_model, inputs, labels)
    report(arguments.out, stamps, steps=len(loader), accuracy=accuracy)


if __name__ == "__main__":
    main()
