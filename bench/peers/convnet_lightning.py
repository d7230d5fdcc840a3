"""Lightning without logger, checkpoints, progress bar or model summary; `bf16-mixed` for bf16."""

from __future__ import annotations

import convnet_job
import convnet_torch
import lightning
import torch
from stamps import Stamps, report
from torch.nn import functional
from torch.utils.data import DataLoader


class Classifier(lightning.LightningModule):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.model = convnet_torch.model(seed)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        return functional.cross_entropy(self.model(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=convnet_job.LEARNING_RATE)


class Clock(lightning.Callback):
    def __init__(self, stamps: Stamps) -> None:
        self.stamps = stamps

    def on_train_epoch_end(
        self, trainer: lightning.Trainer, module: lightning.LightningModule
    ) -> None:
        self.stamps.mark()


def main() -> None:
    arguments = convnet_job.parser().parse_args()
    torch.set_num_threads(arguments.threads)
    train, held_out = convnet_torch.load(arguments.images)
    module = Classifier(arguments.seed)
    loader = DataLoader(train, batch_size=convnet_job.BATCH, shuffle=True)
    stamps = Stamps()
    trainer = lightning.Trainer(
        accelerator="cpu",
        precision={"fp32": "32-true", "bf16": "bf16-mixed"}[arguments.precision],
        max_epochs=1 + arguments.epochs,
        callbacks=[Clock(stamps)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)

    accuracy = convnet_torch.accuracy(module.model, held_out)
    report(arguments.out, stamps, steps=len(loader), accuracy=accuracy)


if __name__ == "__main__":
    main()
