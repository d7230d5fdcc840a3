"""The losses of a run whose settings are all given, with frozen features kept or not."""

from __future__ import annotations

import json
import os

import torch
import transfer_job
import transfer_torch
from torch.nn import functional

import flatout

# Nothing but keeping may change what a run rounds; `allow="exact"` would forbid that as well.
PLAIN = {
    "memory_format": "contiguous",
    "rewrites": "off",
    "fused_norms": "off",
    "fused_optimizer": "off",
    "fp32_operators": "off",
    "compile": "off",
}


def main() -> None:
    parser = transfer_job.parser()
    parser.add_argument("--where", choices=["off", "memory"], required=True)
    parser.add_argument("--flip", action="store_true", help="mirror every second image")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    os.environ["FLATOUT_CACHE"] = str(arguments.out.parent / "cache")
    images = flatout.data.images(arguments.images, size=arguments.size)
    if arguments.flip:
        images = images.augment(flip="horizontal")
    losses: list[torch.Tensor] = []

    def recorded(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(output, target)
        losses.append(loss.detach())
        return loss

    said: list[str] = []
    trainer = flatout.Trainer(
        transfer_torch.model(arguments.size),
        loss=recorded,
        optimizer=torch.optim.Adam,
        lr=arguments.lr,
        recipe=flatout.Recipe(
            compute={"precision": arguments.precision, **PLAIN},
            input={"features": arguments.where},
        ),
        say=said.append,
    )
    history = trainer.fit(
        images.shuffle(seed=1).batch(transfer_job.BATCH),
        epochs=1 + arguments.epochs,
        progress=False,
    )
    kept = any("features: kept" in line for line in said)
    if kept != (arguments.where == "memory"):
        raise SystemExit(f"--where {arguments.where}, but: {'; '.join(said)}")
    steps = history.timeline.steps
    result = {"losses": [float(loss) for loss in losses[-steps:]], "note": "; ".join(said)}
    arguments.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
