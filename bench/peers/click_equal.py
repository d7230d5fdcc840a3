"""How far weights are from those of torch's dense optimizers, and whether threads change bits."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import click_job
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import flatout

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "adam with decay": lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=1e-4),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=1e-4),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}


class Factors(nn.Module):
    """A factorization machine: no operator whose sums depend on the number of threads."""

    def __init__(self, rows: int, factors: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.factors = nn.Embedding(rows, 1), nn.Embedding(rows, factors)
        click_job.begin([self.first, self.factors])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits (n,) of ids (n, fields)."""
        return click_job.combined(
            self.first(ids), self.factors(ids), lambda x: x.new_zeros(len(x), 1)
        )


Batches = list[tuple[torch.Tensor, torch.Tensor]]


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches) -> None:
    for ids, clicks in batches:
        optimizer.zero_grad()
        binary_cross_entropy_with_logits(model(ids), clicks).backward()
        optimizer.step()


def by_flatout(
    model: nn.Module, optimizer: torch.optim.Optimizer, arguments: Any, batches: Batches
) -> None:
    recipe = flatout.Recipe(compute={"touched_rows": "on", "precision": "fp32"})
    trainer = flatout.Trainer(
        model,
        loss="binary_cross_entropy",
        optimizer=optimizer,
        recipe=recipe,
        allow="exact",
        say=lambda line: None,
    )
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    trainer.fit((x, y), batch_size=arguments.batch, shuffle=False, epochs=1, progress=False)


def apart(ours: nn.Module, dense: nn.Module) -> float:
    """The norm of what a tensor's weights differ by, as a share of its norm; the largest of all."""
    pairs = zip(ours.state_dict().values(), dense.state_dict().values(), strict=True)
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def one_apart(ours: nn.Module, dense: nn.Module) -> float:
    """The largest difference of a single weight, as a share of its tensor's largest one."""
    pairs = zip(ours.state_dict().values(), dense.state_dict().values(), strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def main() -> None:
    arguments = click_job.parser().parse_args()
    os.environ["FLATOUT_CACHE"] = str(arguments.out.parent / "cache")
    train, held_out = click_job.of(arguments)
    ids = torch.from_numpy(train.ids).split(arguments.batch)
    batches = list(zip(ids, torch.from_numpy(train.clicks).split(arguments.batch), strict=True))
    torch.set_num_threads(arguments.threads)
    differences, of_one = {}, {}
    for name, make in OPTIMIZERS.items():
        dense, ours = (Factors(arguments.rows, arguments.factors) for _ in range(2))
        by_hand(dense, make(dense.parameters()), batches)
        by_flatout(ours, make(ours.parameters()), arguments, batches)
        differences[name], of_one[name] = apart(ours, dense), one_apart(ours, dense)
    dense, fused = (Factors(arguments.rows, arguments.factors) for _ in range(2))
    by_hand(dense, OPTIMIZERS["adam"](dense.parameters()), batches)
    by_hand(fused, torch.optim.Adam(fused.parameters(), lr=1e-3, fused=True), batches)
    found = []
    for threads in (1, arguments.threads):
        torch.set_num_threads(threads)
        found.append(Factors(arguments.rows, arguments.factors))
        optimizer = OPTIMIZERS["adam"](found[-1].parameters())
        by_flatout(found[-1], optimizer, arguments, batches)
    deep = [click_job.model(arguments) for _ in range(2)]
    by_hand(deep[0], OPTIMIZERS["adam"](deep[0].parameters()), batches)
    by_flatout(deep[1], OPTIMIZERS["adam"](deep[1].parameters()), arguments, batches)
    result = {
        "auc": [click_job.auc_of(model, held_out) for model in deep],
        "differences": differences,
        "of_one": of_one,
        # What another rounding makes of torch itself.
        "fused": apart(fused, dense),
        "fused_of_one": one_apart(fused, dense),
        "bitwise": apart(found[1], found[0]) == 0,
    }
    arguments.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
