"""Judges the forecast's model on published series and writes what came of it.

python docs/forecast_accuracy.py > docs/forecast_accuracy.md
python docs/forecast_accuracy.py --check      # exit 1 when docs/forecast_accuracy.md is out of date
python docs/forecast_accuracy.py --widening   # what src/flatout/forecast/widening.json holds
python docs/forecast_accuracy.py --worker     # images per second that a core decodes for ImageNet
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import process_time

import numpy as np
from generated import print_or_check

from flatout.forecast.judge import (
    Case,
    factor_without,
    is_seen,
    judge,
    keys,
    saturating,
    scaling,
    widening,
)
from flatout.forecast.published import GRPC, NETWORKS, WORKER, Source, sources
from flatout.forecast.step import LINK_ERROR
from flatout.words import rounded

PAGE = Path(__file__).with_name("forecast_accuracy.md")
# What was wanted, and what each key is.
WANTED = {
    "published_error_2x": (0.06, "the median error at up to twice what was calibrated on"),
    "published_error_4x": (0.10, "beyond that up to four times"),
    "published_covered": ((0.85, 0.97), "published rates within the 90% interval"),
    "published_error_2x_given": (
        None,
        "the same errors where no step over several hosts was calibrated on, and the network is "
        "known from its line rate alone",
    ),
    "published_error_4x_given": (None, ""),
    "published_covered_given": ((0.85, 0.97), ""),
    "collapse_predicted": (1.0, "rows that saturate, of which the model said so"),
    "collapse_predicted_given": (None, ""),
    "collapse_mistaken": (
        None,
        "rows with twice the devices and 0.8 of twice the rate or more, of which it is said that "
        "they saturate",
    ),
    "collapse_mistaken_given": (None, ""),
    "decision_regret": (
        0.05,
        "the mean over all series and deadlines of what the size that the model says is the "
        "cheapest in time costs beyond the best, or of how late it is",
    ),
    "range_covered": (None, "published rates within the range that is said beyond four times"),
}

HEAD = """\
# How accurate forecasts are

<!-- Made by docs/forecast_accuracy.py from src/flatout/forecast/published/. -->

The model of [`flatout forecast`](forecast.md) is judged by what others have published: it is
calibrated on the first rows of a series, predicts the rows after them, and every error stands here.

```text
python docs/forecast_accuracy.py > docs/forecast_accuracy.md
```

**How calibration and judging are separated**

- The model was built on the series of these sources: {building}.
  The keys below are over the other series alone. Of these it was known before that servers collapse
  where the fullest one's link is full.
- What was put right after errors were looked at, each from a source that is no series' rates:
    1. Servers add up on CPUs, where the model had a GPU's rate for Piz Daint, and jobs without
       tables were charged the latency of sending rows. Before: errors 0.041 and 0.094, covered
       0.904, of rows that saturate on a measured link 5 of 8 told.
    2. What the sources' own scripts say. Piz Daint's servers speak gRPC over TCP, taken as RDMA
       before; TensorFlow's gRPC passes {grpc} GB/s
       ([tensorflow#6116](https://github.com/tensorflow/tensorflow/issues/6116)). A plain DataLoader
       had 8 workers for all GPUs of a host, each of which decodes {worker} images
       per second. TF2 ran one program on one host and another on several, with other collectives
       and another batch norm: rates on one host do not tell those on several, so these are a series
       each. Before: errors 0.042 and 0.095, covered 0.894, 6 of 8 told, and of TF2's two falls
       between one host and two none.
    3. For sizes that were timed, the forecast is the measured time. The model predicts larger sizes
       from the last measured one. Before: errors 0.042 and 0.073, covered 0.904, widened by 1.38
       and 2.07.
    4. NCCL's ring passes all ranks, so a host's link carries (p - 1) / p of the bytes for p ranks.
       The model had a ring of hosts. Gradients are more often sent as soon as they are ready than
       at the end. The error of links grows with each doubling of the timed ranks; before, it was
       the same at any size. Before: errors 0.038 and 0.068 (given: 0.043 and 0.081), covered
       0.913, widened by 1.32 and 2.06.
- One rule for all: the model is calibrated on each beginning of a series of two rows or more (of
  one, where there are but two), and predicts all rows after it. Nothing is fitted to more than one
  series.
- Intervals are widened by the errors of all *other* series, never by the series' own. One error is
  the same for all series: links are {error:.0%} slower or faster at twice the timed ranks, and the
  same again at each further doubling. This error was chosen so that intervals also hold on the
  synthetic series of `tests/forecast/unseen.py`, whose physics is not the model's.
- What a network reaches of its line rate is set by its kind: {bands}.
  Within a host it is 0.1 to 0.9. Gradients are taken to be sent in buckets of 25 MB, ready one
  after the other.

Two kinds of prediction have their own errors and their own widening: *measured*, where a row over
several hosts was calibrated on (or there is but one host), and *given*, where none was, and the
network is known from its line rate.
"""


def page() -> str:
    """Return the whole page as Markdown."""
    cases = judge()
    building = [one.name for one in sources() if not one.series[0].is_judged]
    bands = ", ".join(f"{name} {low} to {high}" for name, (low, high) in NETWORKS.items())
    grpc = " to ".join(f"{rate / 1e9:g}" for rate in GRPC)
    worker = " to ".join(f"{rate:g}" for rate in WORKER)
    names = " and ".join(building)
    parts = [HEAD.format(building=names, bands=bands, grpc=grpc, worker=worker, error=LINK_ERROR)]
    parts += [*keys_text(cases), *collapse_text(cases)]
    for source in sources():
        parts += source_text(source, cases)
    return "\n".join(parts) + "\n"


def keys_text(cases: Sequence[Case]) -> Iterator[str]:
    """The keys, what was wanted of them, and by how much intervals are widened."""
    yield "| key | found | wanted | met | |\n|---|---|---|---|---|"
    for name, value in keys(cases).items():
        wanted, words = WANTED[name]
        yield f"| `{name}` | {value:.3f} | {wanted_text(wanted)} | {met(value, wanted)} | {words} |"
    factors = widening(cases)
    yield (
        f"\nIntervals of a forecast are widened {factors['measured']:.2f} times where the link was "
        f"measured by steps, {factors['given']:.2f} times where it is given."
    )


def wanted_text(wanted: object) -> str:
    """What is wanted of a key."""
    if isinstance(wanted, tuple):
        return f"{wanted[0]} to {wanted[1]}"
    if wanted is None:
        return ""
    return "all" if wanted == 1.0 else f"at most {wanted}"


def met(value: float, wanted: object) -> str:
    """Whether it is."""
    if wanted is None:
        return ""
    if isinstance(wanted, tuple):
        is_met = wanted[0] <= round(value, 3) <= wanted[1]
    else:
        is_met = value >= 1 if wanted == 1.0 else value <= float(str(wanted))
    return "yes" if is_met else "**no**"


def collapse_text(cases: Sequence[Case]) -> Iterator[str]:
    """Rows that saturate, and rows of which it is said though they do not."""
    yield (
        "\n## Series that saturate\n\nRows at which twice the devices gave less than 0.75 of twice "
        "the rate, predicted from all rows before. The model says so where it predicts less than "
        "0.8.\n"
    )
    yield from doubling_text(saturating(cases))
    yield "\nSaid so, where it was 0.8 or more:\n"
    yield from doubling_text([case for case in scaling(cases) if is_seen(case)])


def doubling_text(cases: Sequence[Case]) -> Iterator[str]:
    """A table of rows with twice the devices of the one before."""
    yield "| series | devices | published | predicted | said so | |\n|---|---|---|---|---|---|"
    for case in cases:
        truth, found = case.marginal
        said = "yes" if is_seen(case) else "**no**"
        built = kind_of(case) if case.series.is_judged else "built on"
        yield (
            f"| {case.series.name} | {case.series.shapes[case.place].ranks} | {truth:.2f} | "
            f"{found:.2f} | {said} | {built} |"
        )


def source_text(source: Source, cases: Sequence[Case]) -> Iterator[str]:
    """Every error of a source's series."""
    yield f"\n## {source.name}\n\n{source.remark} From {source.where}."
    if not source.series[0].is_judged:
        yield "\nThe model was built on these series, which do not count in the keys."
    systems = dict.fromkeys(one.system for one in source.series)
    yield "\n" + "\n".join(f"- {one}" for one in systems) + "\n"
    yield (
        "| series | calibrated on | predicted | published | error | 90% interval | within |\n"
        "|---|---|---|---|---|---|---|"
    )
    for case in cases:
        if case.series.source == source.name:
            yield case_text(case, cases)


def case_text(case: Case, cases: Sequence[Case]) -> str:
    """One prediction."""
    one, factor = case.series, factor_without(cases, case)
    found = case.predicted.widened(factor)
    ranks = [shape.ranks for shape in one.shapes]
    known = ", ".join(map(str, ranks[: case.rows]))
    kind = f" ({kind_of(case)})" if case.is_crossing else ""
    inside = "yes" if case.score <= factor else "**no**"
    said = f"{rounded(found.middle)}" if case.is_number else "a range"
    error = f"{case.error:+.1%}" if case.is_number else ""
    cells = [one.name, known + kind, f"{ranks[case.place]}: {said}", rounded(case.truth), error]
    return row_text([*cells, f"{rounded(found.low)} to {rounded(found.high)}", inside])


def row_text(cells: Sequence[str]) -> str:
    """A line of a table."""
    return f"| {' | '.join(cells)} |"


def kind_of(case: Case) -> str:
    """What is known of its network."""
    return "given" if case.is_crossing else "measured"


def worker_rate(seconds: float = 5.0) -> float:
    """Images per second of a core, with the usual steps of training on ImageNet.

    Pillow decodes a photograph of 500x375 and 100 KB or so, cuts out between 8% and 100%, makes
    that 224x224 and mirrors half of them; numpy makes normalized floats of it.
    """
    from PIL import Image
    from sklearn.datasets import load_sample_images

    files = []
    for photograph in load_sample_images().images:
        stream = io.BytesIO()
        Image.fromarray(photograph).resize((500, 375)).save(stream, "JPEG", quality=95)
        files.append(stream.getvalue())
    rng, count, began = np.random.default_rng(0), 0, process_time()
    while (passed := process_time() - began) < seconds:
        image = Image.open(io.BytesIO(files[count % len(files)])).convert("RGB")
        side = rng.uniform(0.08, 1.0) ** 0.5
        width, height = round(side * image.width), round(side * image.height)
        left = int(rng.integers(image.width - width + 1))
        top = int(rng.integers(image.height - height + 1))
        box = (left, top, left + width, top + height)
        small = image.resize((224, 224), Image.Resampling.BILINEAR, box)
        if rng.uniform() < 0.5:
            small = small.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        values = np.asarray(small, np.float32).transpose(2, 0, 1) / 255
        (values - 0.45) / 0.225
        count += 1
    return count / passed


if __name__ == "__main__":
    if "--worker" in sys.argv[1:]:
        print(f"{worker_rate():.0f}")
        raise SystemExit
    if "--widening" in sys.argv[1:]:
        print(json.dumps(widening(judge())))
        raise SystemExit
    raise SystemExit(print_or_check(PAGE, page()))
