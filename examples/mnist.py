"""MNIST, Fashion-MNIST or any other IDX files, in a run that can be stopped and resumed.

python examples/mnist.py FOLDER [epochs]

The folder holds the usual files, packed by gzip or not; where it has only one pair of them, its
last 2,000 images are held out. Start it again after Ctrl-C, and it goes on.
"""

import sys

import torch

import flatout
from flatout.train.callbacks import BestCheckpoint

folder = sys.argv[1]
epochs = int(sys.argv[2]) if len(sys.argv) > 2 else 5
train, test = flatout.data.idx_split(folder)

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 32, 3),
    torch.nn.ReLU(),
    torch.nn.MaxPool2d(2),
    torch.nn.Conv2d(32, 64, 3),
    torch.nn.ReLU(),
    torch.nn.MaxPool2d(2),
    torch.nn.Conv2d(64, 64, 3),
    torch.nn.ReLU(),
    torch.nn.Flatten(),
    torch.nn.Linear(64 * 3 * 3, 64),
    torch.nn.ReLU(),
    torch.nn.Linear(64, 10),
)


def one_cycle(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.OneCycleLR:
    steps = epochs * -(-len(train) // 64)
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)


trainer = flatout.Trainer(
    model,
    loss="cross_entropy",
    optimizer=torch.optim.Adam,
    scheduler=one_cycle,
    metrics=["accuracy"],
    run="runs/mnist",
)
history = trainer.fit(
    train,
    batch_size=64,
    epochs=epochs,
    validation_data=test,
    callbacks=[BestCheckpoint("val_accuracy")],
    resume=True,
)
print(history.summary())
for change in trainer.resolved.changes():
    print(f"{change.field} = {change.value}: {change.parity} {change.ratio} {change.reason}")
