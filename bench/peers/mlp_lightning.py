"""Lightning without logger, checkpoints, progress bar or model summary; Adam fused."""

from __future__ import annotations

import lightning
import mlp_job
import mlp_torch
import torch
from stamps import Stamps, report
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = mlp_torch.model()

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        return functional.cross_entropy(self.model(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=mlp_job.LEARNING_RATE, fused=True)


class Clock(lightning.Callback):
    def __init__(self, stamps: Stamps) -> None:
        self.stamps = stamps

    def on_train_epoch_end(
        self, trainer: lightning.Trainer, module: lightning.LightningModule
    ) -> None:
        self.stamps.mark()


def main() -> None:
    arguments = mlp_job.arguments()
    torch.set_num_threads(mlp_job.THREADS)
    inputs, labels = mlp_torch.tensors(arguments.samples)
    loader = DataLoader(TensorDataset(inputs, labels), batch_size=mlp_job.BATCH, shuffle=True)
    module = Classifier()
    stamps = Stamps()
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1 + arguments.epochs,
        callbacks=[Clock(stamps)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)

    accuracy = mlp_torch.accuracy(module.model, inputs, labels)
    report(arguments.out, stamps, steps=len(loader), accuracy=accuracy)


if __name__ == "__main__":
    main()
