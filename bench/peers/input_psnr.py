"""How far Flatout's reduced decoding is from decoding whole and resizing with antialiasing.

Pillow's three filters are the references. The squared errors of all images are taken together, so
that a poor image is not outweighed by good ones.
"""

from __future__ import annotations

import json
import os

import input_job
import numpy as np
from PIL import Image

ARGUMENTS = input_job.start()
os.environ["FLATOUT_CACHE"] = str(ARGUMENTS.out.parent / "cache")

import flatout  # noqa: E402

SIZE = (input_job.PIXELS, input_job.PIXELS)
FILTERS = ("BILINEAR", "BICUBIC", "LANCZOS")


def psnr(squared_error: float) -> float:
    return float(10 * np.log10(255**2 / squared_error))


def squared_errors(path: str, pixels: np.ndarray) -> list[float]:
    """The mean over an image's pixels, for each filter."""
    with Image.open(path) as image:
        whole = image.convert("RGB")
    wanted = [
        np.asarray(whole.resize(SIZE, Image.Resampling[name]), np.float64) for name in FILTERS
    ]
    return [float(((pixels - reference) ** 2).mean()) for reference in wanted]


def main() -> None:
    paths, _ = input_job.image_paths(ARGUMENTS)
    pipeline = flatout.data.images(
        input_job.folder(ARGUMENTS), size=SIZE, classes=input_job.CLASSES, reduced=True
    ).batch(input_job.BATCH["jpeg"])
    errors = [
        squared_errors(paths[row], image)
        for batch in pipeline.batches(0)
        for row, image in zip(
            batch.indices.tolist(), batch.inputs.permute(0, 2, 3, 1).double().numpy(), strict=True
        )
    ]
    assert len(errors) == len(paths)
    found = np.array(errors)
    result = {
        name: {"psnr": psnr(own.mean()), "worst": psnr(own.max())}
        for name, own in zip(FILTERS, found.T, strict=True)
    }
    ARGUMENTS.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
