"""Augmentation of images in memory beside libraries that need no torchvision: images a second.

    python bench/augment.py [--seconds 2] [--restarts 3] [--only flatout pillow] [--json [FILE]]

Each arm is a process that runs every stage it has over the same uint8 images, `--seconds` each, on
the same number of threads: Flatout's `augment` and `mixup`; Albumentations and Pillow by image, a
batch in each thread, handed over in order in memory that is used again; Keras' layers by batch on
torch. Batches are uint8 again, those of Keras' mixup float32. Distributions are those that each
library has for the same words: the work is alike, not the pixels. Flatout runs twice a round: A/A.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from statistics import median
from typing import Any

from flatout.measure import Interval, bootstrap_ratio
from restarts import Peer, PeerFailed, absence, run_once, tell, versions
from results import Key, Results, add_arguments, finish, interval_words, positive

STAGES = ("flip", "turns", "resized_crop", "color", "cutout", "mixup", "all")
NEEDS = {"albumentations": ("albumentations",), "pillow": ("PIL",), "keras": ("keras",)}
ARMS = ("flatout", "flatout again", *NEEDS)

# By arm, the images a second of each restart, by stage.
Rates = Mapping[str, list[dict[str, float]]]


def measure(a: argparse.Namespace) -> tuple[Rates, dict[str, str]]:
    """All arms, a round after the other; and why some were left out."""
    chosen = [arm for arm in ARMS if arm.removesuffix(" again") in a.only]
    peers = {}
    for arm in chosen:
        name = arm.removesuffix(" again")
        sizes = (f"--{one}={getattr(a, one)}" for one in ("images", "size", "batch", "threads"))
        arguments = (f"--arm={name}", *sizes, f"--seconds={a.seconds}")
        peers[arm] = Peer(arm, "augment_job.py", arguments, NEEDS.get(name, ()))
    left = {arm: reason for arm, peer in peers.items() if (reason := absence(peer))}
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in chosen if arm not in left}
    for turn in range(a.restarts):
        for arm in [*found] if turn % 2 == 0 else [*reversed(found)]:
            if arm in left:
                continue
            try:
                found[arm].append(run_once(peers[arm])["images_per_s"])
            except PeerFailed as error:
                left.update({} if found[arm] else {arm: f"failed: {error}"})
            tell(f"{turn + 1}/{a.restarts} {arm}")
    return {arm: runs for arm, runs in found.items() if arm not in left}, left


def faster(rates: Rates, stage: str, arm: str, other: str) -> Interval | str:
    """How many times as fast one arm is as another."""
    own, others = (
        [run[stage] for run in rates.get(name, ()) if stage in run] for name in (arm, other)
    )
    if not own or not others:
        return f"{other if own else arm} has no {stage}"
    return bootstrap_ratio([1 / rate for rate in others], [1 / rate for rate in own])


def best_peer(rates: Rates, stage: str) -> str | None:
    """The peer that is the fastest in a stage."""
    middles = {
        arm: median(run[stage] for run in runs)
        for arm, runs in rates.items()
        if arm in NEEDS and runs and stage in runs[0]
    }
    return max(middles, key=lambda arm: middles[arm], default=None)


def keys_of(rates: Rates) -> list[Key]:
    keys = []
    for stage in STAGES:
        peer = best_peer(rates, stage)
        found = faster(rates, stage, "flatout", peer) if peer else "no peer has it"
        keys.append(Key(f"{stage}_vs_best_peer", found, note=peer or ""))
    again = faster(rates, "all", "flatout", "flatout again")
    return [*keys, Key("all_vs_itself", again, note="A/A")]


def line(rates: Rates, arm: str, left: Mapping[str, str]) -> list[str]:
    runs = rates.get(arm, [])
    cells = [
        f"{median(run[stage] for run in runs):,.0f}" if runs and stage in runs[0] else ""
        for stage in STAGES
    ]
    against = faster(rates, "all", "flatout", arm)
    words = "" if isinstance(against, str) else f"flatout is {interval_words(against)} x in all"
    return [arm, *cells, left.get(arm, words)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, restarts=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each stage")
    parser.add_argument("--images", type=positive, default=512)
    parser.add_argument("--size", type=positive, default=224)
    parser.add_argument("--batch", type=positive, default=32)
    parser.add_argument("--threads", type=positive, default=2)
    names = ("flatout", *NEEDS)
    parser.add_argument("--only", nargs="*", choices=names, default=names)
    a = parser.parse_args()
    rates, left = measure(a)
    data: dict[str, Any] = {
        "images_per_s": rates,
        "left_out": left,
        "versions": versions([Peer("", "", needs=needs) for needs in NEEDS.values()]),
    }
    results = Results(
        title=f"Images of {a.size} x {a.size} a second on {a.threads} threads, restarts: "
        f"{a.restarts}",
        headers=["", *STAGES, ""],
        lines=[line(rates, arm, left) for arm in [*rates, *left]],
        remarks=[
            "all: resized_crop, flip, color and cutout of each image",
            "resized_crop: Flatout and Pillow average over all pixels where they make an image "
            "smaller, Albumentations takes four",
        ],
        keys=keys_of(rates),
        data=data,
    )
    return finish(results, a)


if __name__ == "__main__":
    sys.exit(main())
