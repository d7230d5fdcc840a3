"""Classes that validation has and training has not, by the datasets of both."""

import pytest

from observed import observed

START = """
import torch; torch.manual_seed(0)
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split

def train(training, held_out, classes=5):
    model = nn.Linear(4, classes)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(3):
        for given, target in DataLoader(training, 8, shuffle=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(given), target).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            for given, target in DataLoader(held_out, 8):
                model(given)
        model.train()

x, y = torch.randn(100, 4), torch.arange(100) // 20
data = TensorDataset(x, y)
"""
SPLITS = {
    "a subset": ("Subset(data, range(70)), Subset(data, range(70, 100))", ([4], 20)),
    "slices": ("TensorDataset(x[:50], y[:50]), TensorDataset(x[50:], y[50:])", ([3, 4], 40)),
    "drawn": ("*random_split(data, [70, 30])", None),
    "tasks in turn": ("TensorDataset(x[:40], y[:40]), TensorDataset(x, y)", None),
    "no labels": ("TensorDataset(x[:50], y[:50]), TensorDataset(x[50:], x[50:])", None),
}
KERAS = """
import os
os.environ["KERAS_BACKEND"] = "torch"
import keras, numpy as np
keras.utils.set_random_seed(0)
x, y = np.random.randn(200, 4).astype("float32"), np.arange(200) // 40
model = keras.Sequential([keras.layers.Dense(5)])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile("adam", loss)
model.fit(x, y, batch_size=16, epochs=3, validation_split=0.3, verbose=0)
"""


@pytest.mark.parametrize("case", SPLITS)
def test_classes_of_validation_alone_are_counted(tmp_path, case):
    split, unseen = SPLITS[case]
    seen = observed(tmp_path, f"{START}\ntrain({split})\n")
    (held_out,) = [loader for loader in seen.loaders if not loader.in_training]
    assert held_out.unseen_classes == unseen


@pytest.mark.slow
def test_keras_takes_the_last_samples(tmp_path):
    pytest.importorskip("keras")
    seen = observed(tmp_path, KERAS)
    assert [loader.unseen_classes for loader in seen.loaders if not loader.in_training] == [
        ([4], 40)
    ]
