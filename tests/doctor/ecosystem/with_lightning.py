"""Trains a small network with Lightning; --wrong for mistakes, which are marked."""

import sys

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

WRONG = "--wrong" in sys.argv


class Signals(Dataset):
    def __init__(self, rows, seed):
        self.rng = np.random.default_rng(seed)
        self.rows = self.rng.normal(size=(rows, 64)).astype("float32")
        self.sums = self.rows[:, :8].sum(1).astype("float32")

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, at):
        row = self.rows[at]
        for _ in range(40 if WRONG else 0):
            row = np.roll(np.sort(row), 1)  # wrong: map_per_sample
        return torch.from_numpy(row), torch.tensor(self.sums[at])


class Regressor(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 1))

    def forward(self, rows):
        return self.net(rows)

    def training_step(self, batch, index):
        rows, sums = batch
        out = self(rows)
        loss = functional.mse_loss(out if WRONG else out.squeeze(1), sums)  # wrong: loss_broadcast
        self.log("loss", loss, prog_bar=False)
        return loss

    def validation_step(self, batch, index):
        rows, sums = batch
        self.log("mse", functional.mse_loss(self(rows).squeeze(1), sums))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3, fused=True)


class Probe(pl.Callback):
    """Measures after each epoch."""

    def __init__(self, rows):
        self.rows = rows

    def on_train_epoch_end(self, trainer, module):
        if not WRONG:
            module.eval()
        with torch.no_grad():
            module(self.rows)  # wrong: eval_missing
        module.train()


if __name__ == "__main__":
    torch.manual_seed(0)
    train, held_out = Signals(2048, 0), Signals(256, 1)
    probe = Probe(torch.from_numpy(held_out.rows))
    mode = "max" if WRONG else "min"
    stopping = EarlyStopping("mse", mode=mode, patience=500)  # wrong: monitor_reversed
    trainer = pl.Trainer(
        max_epochs=200,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[probe, stopping],
        enable_model_summary=False,
    )
    batches = DataLoader(train, 32, shuffle=True)  # wrong: workers_zero
    trainer.fit(Regressor(), batches, DataLoader(held_out, 64))
