"""A script of the corpus as a LightningModule, run by Lightning with its SimpleProfiler.

    doctor_lightning.py pitfall/NAME.py [--epochs N] [--steps N]

Model, data and pitfall are the script's own; only the loop is Lightning's.
"""

import argparse
import importlib.util
import sys
import warnings
from pathlib import Path

import lightning
import torch
from lightning.pytorch.profilers import SimpleProfiler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class WorkersZero(lightning.LightningModule):
    def __init__(self, script):
        super().__init__()
        self.model, self.data = script.Listener(), script.Sounds(960, 1)

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=32, shuffle=True)

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=2e-3, fused=True)


class LogEachStep(lightning.LightningModule):
    def __init__(self, script):
        super().__init__()
        layers = [nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()]
        self.model = nn.Sequential(*layers, nn.Linear(128, 10))
        self.recorder = script.Recorder("train.jsonl")
        pixels, labels = script.load_digits(return_X_y=True)
        self.data = TensorDataset(torch.tensor(pixels).float() / 16, torch.tensor(labels))

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=64, shuffle=True)

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def on_train_batch_end(self, outputs, batch, index):
        self.recorder.log(self.global_step, outputs["loss"].detach(), self.model)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3, fused=True)


class OptimizerUnfused(lightning.LightningModule):
    def __init__(self, script):
        super().__init__()
        self.model = script.Pairs()
        words = torch.randint(script.WORDS, (40_000,))
        beside = (words + torch.randint(1, 4, words.shape)) % script.WORDS
        self.data = TensorDataset(words, beside)

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=128, shuffle=True)

    def training_step(self, batch, index):
        left, right = self.model(batch[0]), self.model(batch[1])
        return nn.functional.cross_entropy(left @ right.T / 8, torch.arange(len(left)))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


PORTS = {
    "workers_zero": WorkersZero,
    "log_each_step": LogEachStep,
    "optimizer_unfused": OptimizerUnfused,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("script", type=Path)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    spec = importlib.util.spec_from_file_location(args.script.stem, args.script)
    script = sys.modules[args.script.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    trainer = lightning.Trainer(
        max_epochs=args.epochs,
        limit_train_batches=args.steps,
        profiler=SimpleProfiler(),
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(PORTS[args.script.stem](script))


if __name__ == "__main__":
    main()
