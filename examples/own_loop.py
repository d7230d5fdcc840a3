"""A training loop of one's own, with Flatout's settings, steps and checkpoints.

python examples/own_loop.py [epochs]

It adds noise to the inputs, less with each epoch, and stops once 97% of the held-out digits are
right. Start it again with more epochs, and it goes on.
"""

import sys

import torch
from torch.nn.functional import cross_entropy

import flatout

epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 20
train, test = flatout.data.digits(size=8)
source = flatout.data.as_source(train, batch_size=64, seed=0)
held_out = flatout.data.as_source(test, batch_size=120, shuffle=False)

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Flatten(), torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loop = flatout.Loop(run="runs/own-loop", resume=True, clip_norm=1.0)


def compute(batch: flatout.data.Batch) -> torch.Tensor:
    noise = torch.randn_like(batch.inputs) * 0.3 / (1 + loop.epoch)
    return cross_entropy(model(batch.inputs + noise), batch.targets)


def accuracy() -> float:
    model.eval()
    right = 0
    with torch.no_grad(), loop.autocast():
        for batch in map(loop.ready, held_out.batches(0)):
            right += int((model(batch.inputs).argmax(1) == batch.targets).sum())
    model.train()
    return right / held_out.samples


loop.prepare(model, optimizer, compute=compute, data=source, steps=epochs * source.steps)
for epoch in loop.epochs(epochs):
    for batch in loop.batches(source):
        loop.step(compute, batch)
    loop.check_numbers(compute)
    reached = accuracy()
    print(f"epoch {epoch + 1}: loss {loop.mean_loss():.4f}, held-out accuracy {reached:.2%}")
    loop.save()
    if reached >= 0.97:
        break
loop.close()
