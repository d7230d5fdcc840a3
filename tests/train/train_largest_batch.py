"""Fits whose batch is chosen."""

import torch
from torch import nn
from train_jobs import data

import flatout
from flatout.train import largest_batch


class Wide(nn.Module):
    """Keeps so many numbers of each sample for the backward."""

    def __init__(self, kept=250_000):
        super().__init__()
        self.inner = nn.Linear(12, 3)
        self.kept = kept

    def forward(self, x):
        outputs = self.inner(x)
        wide = outputs.mean(1, keepdim=True).expand(-1, self.kept).exp()
        return outputs + wide.mean(1, keepdim=True)


def fit(model, monkeypatch=None, free=None, *, x=None, **options):
    if free is not None:
        monkeypatch.setattr(largest_batch, "available_bytes", lambda: free)
    said = []
    given = {key: options.pop(key) for key in ("run", "recipe", "lr_rule") if key in options}
    trainer = flatout.Trainer(
        model, optimizer=torch.optim.SGD, lr=0.1, say=said.append, allow="exact", **given
    )
    history = trainer.fit(data() if x is None else x, batch_size="auto", progress=False, **options)
    return trainer, history, said
