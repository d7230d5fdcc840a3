"""JPEG files by Pillow or OpenCV, a batch at a time in a thread for each core.

pil      decoded whole, then reduced with an antialiasing filter
draft    Pillow's draft mode: decoded at half the size, then as `pil`
opencv   decoded at half the size, then resized bilinearly
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import input_job
import numpy as np

SIZE = (input_job.PIXELS, input_job.PIXELS)


def decoder(form: str) -> Callable[[str], np.ndarray]:
    if form == "opencv":
        return opencv()
    from PIL import Image

    def decode(path: str) -> np.ndarray:
        with Image.open(path) as image:
            if form == "draft":
                image.draft("RGB", SIZE)
            return np.asarray(image.convert("RGB").resize(SIZE, Image.Resampling.BILINEAR))

    return decode


def opencv() -> Callable[[str], np.ndarray]:
    import cv2

    cv2.setNumThreads(1)  # the cores have a batch each

    def decode(path: str) -> np.ndarray:
        half = cv2.imread(path, cv2.IMREAD_REDUCED_COLOR_2)
        small = cv2.resize(half, SIZE, interpolation=cv2.INTER_LINEAR)
        return cv2.cvtColor(small, cv2.COLOR_BGR2RGB)

    return decode


def main() -> None:
    arguments = input_job.start()
    decode = decoder(arguments.form)
    paths, labels = input_job.image_paths(arguments)
    size = input_job.BATCH[arguments.kind]

    def batch(rows: np.ndarray) -> input_job.Batch:
        pixels = np.empty((len(rows), *SIZE, 3), np.uint8)
        for place, row in enumerate(rows):
            pixels[place] = decode(paths[row])
        return labels[rows], pixels

    def open_files() -> input_job.Pass:
        pool = ThreadPoolExecutor(arguments.threads) if arguments.threads > 1 else None

        def one_pass(epoch: int) -> Iterator[input_job.Batch]:
            order = np.random.default_rng(epoch).permutation(len(paths))
            batches = np.split(order, range(size, len(order), size))
            return pool.map(batch, batches) if pool else map(batch, batches)

        return one_pass

    input_job.measure(arguments, open_files)


if __name__ == "__main__":
    main()
