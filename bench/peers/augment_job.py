"""One arm of bench/augment.py: passes of each stage over the same photographs in memory."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

import flatout

STAGES = ("flip", "turns", "resized_crop", "color", "cutout", "mixup", "all")
CHANGE, CUT, ALPHA = 0.3, 56, 0.2
# What makes a batch of uint8 images of shape (rows, height, width, channels).
Make = Callable[[np.ndarray], Any]


def photographs(count: int, size: int) -> np.ndarray:
    """Smooth colors with some noise, uint8 of shape (count, size, size, 3)."""
    rng = np.random.default_rng(0)
    small = torch.from_numpy(rng.uniform(0, 255, (count, 3, 7, 7)).astype(np.float32))
    smooth = torch.nn.functional.interpolate(small, (size, size), mode="bicubic")
    noise = rng.normal(0, 8, (size, size, 3)).astype(np.float32)
    pixels = smooth.permute(0, 2, 3, 1).numpy() + noise
    return np.ascontiguousarray(pixels.clip(0, 255).astype(np.uint8))


def of_flatout(stage: str, images: np.ndarray, batch: int, threads: int) -> Callable[[], Any]:
    side = images.shape[1]
    given: dict[str, dict[str, Any]] = {
        "flip": {"flip": "horizontal"},
        "turns": {"rotate": 90},
        "resized_crop": {"random_resized_crop": side},
        "color": {"brightness": CHANGE, "contrast": CHANGE, "saturation": CHANGE},
        "cutout": {"cutout": CUT},
    }
    given["all"] = {**given["resized_crop"], **given["flip"], **given["color"], **given["cutout"]}
    data = flatout.data.arrays(images, np.arange(len(images)) % 10)
    data = data if stage == "mixup" else data.augment(**given[stage])
    data = data.batch(batch).options(threads=threads)
    data = data.mixup(ALPHA, classes=10) if stage == "mixup" else data
    epochs = iter(range(10**9))
    return lambda: sum(one.size for one in data.batches(next(epochs)))


def over_batches(make: Make, images: np.ndarray, batch: int) -> Callable[[], Any]:
    starts = range(0, len(images), batch)
    return lambda: sum(len(make(images[start : start + batch])) for start in starts)


def over_images(
    change: Callable[[np.ndarray], np.ndarray], images: np.ndarray, batch: int, threads: int
) -> Callable[[], Any]:
    """Image by image, a batch in each thread, handed over in order; memory is used again."""
    pool = ThreadPoolExecutor(threads)
    memory = [np.empty_like(images[:batch]) for _ in range(2 * threads + 1)]

    def make(start: int, made: np.ndarray) -> int:
        some = images[start : start + batch]
        for at, image in enumerate(some):
            made[at] = change(image)
        return len(some)

    def run() -> int:
        ahead: deque[Future[int]] = deque()
        count = 0
        for number, start in enumerate(range(0, len(images), batch)):
            ahead.append(pool.submit(make, start, memory[number % len(memory)]))
            if len(ahead) == len(memory):
                count += ahead.popleft().result()
        return count + sum(one.result() for one in ahead)

    return run


def of_albumentations(stage: str, images: np.ndarray, batch: int, threads: int) -> Any:
    os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"
    import albumentations as A
    import cv2

    cv2.setNumThreads(0)  # images are shared out among threads
    side = images.shape[1]
    span = (1 - CHANGE, 1 + CHANGE)
    known = {
        "flip": [A.HorizontalFlip(p=0.5)],
        "turns": [A.RandomRotate90(p=1)],
        "resized_crop": [A.RandomResizedCrop((side, side), p=1)],
        "color": [A.ColorJitter(span, span, span, hue=(0, 0), p=1)],
        "cutout": [A.CoarseDropout((1, 1), (CUT, CUT), (CUT, CUT), p=1)],
    }
    known["all"] = [known[one][0] for one in ("resized_crop", "flip", "color", "cutout")]
    if stage not in known:
        return None
    change = A.Compose(known[stage])
    return over_images(lambda image: change(image=image)["image"], images, batch, threads)


def of_pillow(stage: str, images: np.ndarray, batch: int, threads: int) -> Any:
    from PIL import Image, ImageEnhance

    side = images.shape[1]
    rng = np.random.default_rng(0)

    def flip(image: Any) -> Any:
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else image

    def turns(image: Any) -> Any:
        turn = [None, *list(Image.Transpose)[2:5]][int(rng.integers(4))]
        return image if turn is None else image.transpose(turn)

    def resized_crop(image: Any) -> Any:
        share, shape = rng.uniform(0.08, 1), np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3)))
        wide, high = (min(side, side * (share * r) ** 0.5) for r in (shape, 1 / shape))
        left, top = rng.uniform(0, side - wide), rng.uniform(0, side - high)
        box = (left, top, left + wide, top + high)
        return image.resize((side, side), Image.Resampling.BILINEAR, box=box)

    def color(image: Any) -> Any:
        for kind in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
            image = kind(image).enhance(rng.uniform(1 - CHANGE, 1 + CHANGE))
        return image

    def cutout(image: Any) -> Any:
        left, top = (int(at) - CUT // 2 for at in rng.integers(side, size=2))
        image.paste(0, (max(0, left), max(0, top), left + CUT, top + CUT))
        return image

    known = {
        "flip": [flip],
        "turns": [turns],
        "resized_crop": [resized_crop],
        "color": [color],
        "cutout": [cutout],
        "all": [resized_crop, flip, color, cutout],
    }
    if stage not in known:
        return None

    def change(pixels: np.ndarray) -> np.ndarray:
        image = Image.fromarray(pixels)
        for function in known[stage]:
            image = function(image)
        return np.asarray(image)

    return over_images(change, images, batch, threads)


def of_keras(stage: str, images: np.ndarray, batch: int, threads: int) -> Any:
    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    layers = keras.layers
    given = {"value_range": (0, 255)}
    color = [
        layers.RandomBrightness(CHANGE, **given),
        layers.RandomContrast(CHANGE, **given),
        layers.RandomSaturation((0.5 - CHANGE / 2, 0.5 + CHANGE / 2), **given),
    ]
    share = (CUT / images.shape[1]) ** 2
    cutout = layers.RandomErasing(factor=1.0, scale=(share, share), fill_value=0, **given)
    known = {"flip": [layers.RandomFlip("horizontal")], "color": color, "cutout": [cutout]}
    if stage == "mixup":
        mixup = layers.MixUp(ALPHA)
        labels = torch.nn.functional.one_hot(torch.arange(batch) % 10, 10).float()

        def blend(some: np.ndarray) -> Any:
            pixels = torch.from_numpy(some).float()
            return mixup({"images": pixels, "labels": labels[: len(some)]}, training=True)["images"]

        return over_batches(blend, images, batch)
    if stage not in known:
        return None

    def make(some: np.ndarray) -> Any:
        pixels: Any = torch.from_numpy(some).float()
        for layer in known[stage]:
            pixels = layer(pixels, training=True)
        return pixels.to(torch.uint8)

    return over_batches(make, images, batch)


ARMS = {
    "flatout": of_flatout,
    "albumentations": of_albumentations,
    "pillow": of_pillow,
    "keras": of_keras,
}


def rates(run: Callable[[], Any], count: int, seconds: float) -> Iterator[float]:
    """Images a second of each pass, after one that does not count."""
    run()
    spent = 0.0
    while spent < seconds:
        began = time.perf_counter()
        run()
        took = time.perf_counter() - began
        spent += took
        yield count / took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arm", choices=list(ARMS), required=True)
    for name in ("images", "size", "batch", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    images = photographs(a.images, a.size)
    found = {}
    with torch.no_grad():
        for stage in STAGES:
            run = ARMS[a.arm](stage, images, a.batch, a.threads)
            if run is not None:
                found[stage] = median(rates(run, a.images, a.seconds))
    a.out.write_text(json.dumps({"images_per_s": found}))


if __name__ == "__main__":
    main()
