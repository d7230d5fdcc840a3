"""Plain PyTorch: DataLoader and Pillow; for bf16 autocast and channels_last.

On a GPU fp32 is as torch has it, with convolutions in TF32.
"""

from __future__ import annotations

import torch
import transfer_job
import transfer_torch
from stamps import Stamps
from torch.nn import functional


def main() -> None:
    arguments = transfer_job.parser().parse_args()
    torch.set_num_threads(arguments.threads)
    bf16 = arguments.precision == "bf16"
    layout = torch.channels_last if bf16 else torch.contiguous_format
    device, on_gpu = torch.device(arguments.device), arguments.device == "cuda"
    torch.backends.cudnn.benchmark = on_gpu
    model = transfer_torch.model(arguments.size, arguments.head_only)
    model = model.to(device, memory_format=layout)
    learns = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(learns, lr=arguments.lr)
    images = transfer_torch.Photographs(arguments.images, arguments.size)
    loader = transfer_torch.loader(images, arguments.workers, pins=on_gpu)

    stamps = Stamps()
    for _ in range(1 + arguments.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            with torch.autocast(arguments.device, torch.bfloat16, enabled=bf16):
                output = model(x.to(memory_format=layout))
                loss = functional.cross_entropy(output, y)
            loss.backward()
            optimizer.step()
        stamps.mark()
    transfer_job.report(arguments.out, stamps, images=len(images))


if __name__ == "__main__":
    main()
