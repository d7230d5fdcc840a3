"""Flatout's Trainer: what is frozen is found and kept without being asked for."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import torch
import transfer_job
import transfer_torch
from stamps import Stamps

import flatout

MADV_DONTNEED = 4  # of Linux


class Clock(flatout.Callback):
    """Marks the ends of epochs.

    Args:
        stamps: where to.
        cold: a folder whose files are not in the page cache when an epoch begins.
    """

    def __init__(self, stamps: Stamps, cold: Path | None) -> None:
        self.stamps, self.cold = stamps, cold
        self.began = 0.0

    def on_epoch_start(self, state: object) -> None:
        self.began = self.began or time.perf_counter()

    def on_epoch_end(self, state: object) -> None:
        self.stamps.mark()
        if self.cold is not None:
            leave_page_cache(self.cold)


def leave_page_cache(folder: Path) -> None:
    """Write the files of a folder to disk, unmap their pages here and drop them from memory."""
    os.sync()
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, name = line.split(maxsplit=5)
        if name.startswith(str(folder)):
            begin, end = (int(address, 16) for address in span.split("-"))
            madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), MADV_DONTNEED)
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def run_before(out: Path) -> None:
    """The same in another process, with another learning rate."""
    other = ["--out", str(out.parent / "before.json"), "--lr", "3e-4", "--runs-before", "0"]
    subprocess.run([sys.executable, __file__, *sys.argv[1:], *other], check=True)


def main() -> None:
    parser = transfer_job.parser()
    parser.add_argument("--where", choices=["auto", "memory", "disk"], default="auto")
    parser.add_argument("--compute-in", choices=["auto", "bf16"], default="auto")
    parser.add_argument("--cold", action="store_true", help="the store's pages leave memory")
    parser.add_argument("--runs-before", type=int, default=0, help="with the same cache folder")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    # Every restart decides for itself, as on a machine that has never seen the job.
    cache = arguments.out.parent / "cache"
    os.environ["FLATOUT_CACHE"] = str(cache)
    if arguments.runs_before:
        run_before(arguments.out)

    images = flatout.data.images(arguments.images, size=arguments.size).shuffle(seed=1)
    model = transfer_torch.model(arguments.size, arguments.head_only)
    compute = {"precision": arguments.compute_in}
    if arguments.compute_in == "bf16":
        compute["memory_format"] = "channels_last"
    recipe = flatout.Recipe(
        input={"features": arguments.where},
        compute=compute,
        world={"device": arguments.device},
    )
    said: list[str] = []
    stamps = Stamps()
    clock = Clock(stamps, cache if arguments.cold else None)
    trainer = flatout.Trainer(
        model,
        loss="cross_entropy",
        optimizer=torch.optim.Adam,
        lr=arguments.lr,
        recipe=recipe,
        say=said.append,
    )
    trainer.fit(
        images.batch(transfer_job.BATCH),
        epochs=1 + arguments.epochs,
        callbacks=[clock],
        progress=False,
    )
    if arguments.cold:
        said.append(f"{psutil.Process().io_counters().read_bytes / 1e6:,.0f} MB read from disk")
    transfer_job.report(
        arguments.out,
        stamps,
        images=len(transfer_job.files(arguments.images)[0]),
        # After another run: what its first epoch takes, with the same processes around both.
        since=clock.began if arguments.runs_before else transfer_job.BEGAN,
        note="; ".join(said),
    )


if __name__ == "__main__":
    main()
