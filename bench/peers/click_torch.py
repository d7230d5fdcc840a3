"""PyTorch's own loop: a dense Adam, or sparse gradients with the optimizers that take them."""

from __future__ import annotations

import click_job
import torch
from stamps import Stamps, report
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits


def optimizers_of(model: nn.Module, kind: str) -> list[torch.optim.Optimizer]:
    rate = click_job.LEARNING_RATE
    if kind == "adam":
        return [torch.optim.Adam(model.parameters(), lr=rate)]
    tables = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    known = set(tables)
    rest = [parameter for parameter in model.parameters() if parameter not in known]
    if kind == "sparse-adam":
        own: torch.optim.Optimizer = torch.optim.SparseAdam(tables, lr=rate)
    else:
        own = torch.optim.SGD(tables, lr=0.1)
    return [own, torch.optim.Adam(rest, lr=rate)]


def main() -> None:
    parser = click_job.parser()
    parser.add_argument("--optimizer", choices=["adam", "sparse-adam", "sparse-sgd"])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    train, held_out = click_job.of(arguments)
    model = click_job.model(arguments, sparse=arguments.optimizer != "adam")
    optimizers = optimizers_of(model, arguments.optimizer)
    ids, clicks = torch.from_numpy(train.ids), torch.from_numpy(train.clicks)
    stamps = Stamps()
    if arguments.warm_up == 0:
        stamps.mark()
    for _ in range(arguments.warm_up + arguments.epochs):
        for places in torch.randperm(len(ids)).split(arguments.batch):
            loss = binary_cross_entropy_with_logits(model(ids[places]), clicks[places])
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
        stamps.mark()
    stamps.readings = stamps.readings[-1 - arguments.epochs :]
    auc = click_job.auc_of(model, held_out)
    report(arguments.out, stamps, steps=arguments.steps, accuracy=auc)


if __name__ == "__main__":
    main()
