"""The quick start as a script: handwritten digits that need no download.

python examples/digits.py [epochs]
"""

import sys

import torch

import flatout

epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 60
train, test = flatout.data.digits()

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 32, 3),
    torch.nn.ReLU(),
    torch.nn.MaxPool2d(2),
    torch.nn.Conv2d(32, 64, 3),
    torch.nn.ReLU(),
    torch.nn.MaxPool2d(2),
    torch.nn.Flatten(),
    torch.nn.Linear(64 * 5 * 5, 10),
)
trainer = flatout.Trainer(
    model, loss="cross_entropy", optimizer=torch.optim.Adam, metrics=["accuracy"]
)
history = trainer.fit(train, batch_size=128, epochs=epochs, validation_data=test)
trainer.save("digits.safetensors")
print(history.summary())
