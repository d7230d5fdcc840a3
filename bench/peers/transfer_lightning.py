"""Lightning without logger, checkpoints, progress bar or model summary.

For bf16 `bf16-mixed` and channels_last.
"""

from __future__ import annotations

import lightning
import torch
import transfer_job
import transfer_torch
from convnet_lightning import Clock
from stamps import Stamps
from torch.nn import functional


class Classifier(lightning.LightningModule):
    def __init__(self, arguments: object) -> None:
        super().__init__()
        self.arguments = arguments
        self.layout = (
            torch.channels_last if arguments.precision == "bf16" else torch.contiguous_format
        )
        model = transfer_torch.model(arguments.size, arguments.head_only)
        self.model = model.to(memory_format=self.layout)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        return functional.cross_entropy(self.model(x.to(memory_format=self.layout)), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        learns = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.Adam(learns, lr=self.arguments.lr)


def main() -> None:
    arguments = transfer_job.parser().parse_args()
    torch.set_num_threads(arguments.threads)
    images = transfer_torch.Photographs(arguments.images, arguments.size)
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
    trainer.fit(Classifier(arguments), transfer_torch.loader(images))
    transfer_job.report(arguments.out, stamps, images=len(images))


if __name__ == "__main__":
    main()
