"""Scripts that leave the loop to a library: their lines are the user's, and nothing is a danger."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from flatout.devices.inventory import inventory
from flatout.doctor.judge import judge
from flatout.observe import Observation

DATA = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

torch.manual_seed(0)
x = torch.randn(2048, 64)
y = (x[:, :8].sum(1) > 0).long()


def network():
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.Linear(256, 2))
"""
SCRIPTS = {
    "lightning": """
import lightning as L

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = network()

    def training_step(self, batch, number):
        rows, kinds = batch
        loss = nn.functional.cross_entropy(self.network(rows), kinds)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)

trainer = L.Trainer(max_epochs=20, accelerator="cpu", logger=False, enable_checkpointing=False,
                    enable_progress_bar=False)
trainer.fit(Module(), DataLoader(TensorDataset(x, y), 32, shuffle=True))
""",
    "accelerate": """
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = network()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(x, y), 32, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(20):
    for rows, kinds in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(rows), kinds)
        accelerator.backward(loss)
        optimizer.step()
""",
    "transformers": """
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

class Words(Dataset):
    def __len__(self):
        return 2048

    def __getitem__(self, at):
        words = (x[at, :16].abs() * 20).long().clamp(max=63)
        return {"input_ids": words, "labels": y[at]}

model = BertForSequenceClassification(BertConfig(
    vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
    intermediate_size=128, num_labels=2,
))
arguments = TrainingArguments(
    "out", per_device_train_batch_size=16, num_train_epochs=20, use_cpu=True, report_to=[],
    save_strategy="no", logging_steps=1000, disable_tqdm=True,
)
Trainer(model, arguments, train_dataset=Words()).train()
""",
    "keras": """
import keras

model = keras.Sequential(
    [keras.layers.Dense(256, "relu"), keras.layers.Dense(256), keras.layers.Dense(2)]
)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile("adam", loss)
model.fit(x.numpy(), y.numpy(), batch_size=32, epochs=20, verbose=0)
""",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "keras" else pytest.mark.long) for n in SCRIPTS]
)
def test_lines_are_the_users_and_nothing_is_a_danger(name, tmp_path):
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    script = tmp_path / "train.py"
    script.write_text(DATA + SCRIPTS[name])
    watch = ("-m", "flatout.observe.start", "seen", "--steps", "300", str(script))
    done = subprocess.run(
        [sys.executable, *watch],
        cwd=tmp_path,
        env={**os.environ, "KERAS_BACKEND": "torch", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (file,) = (tmp_path / "seen").glob("rank-*.json")
    seen = Observation.of(json.loads(file.read_text()))
    assert (seen.framework, seen.steps) == (name, 300)
    assert [one for one in judge([seen], inventory()).findings if one.kind == "danger"] == []
    assert {line.site.file for line in seen.lines} == {str(script)}
    assert seen.explained > 0.75
