"""Judges the forecast's model on published series, and writes two pages with the errors.

    python bench/forecast_accuracy.py            # writes both pages
    python bench/forecast_accuracy.py --check    # exit 1 when one of them is out of date
    python bench/forecast_accuracy.py --worker   # images per second that a core decodes

`docs/forecast_accuracy.md` has the keys, `bench/results/forecast_accuracy.md` every prediction.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import process_time

import numpy as np

from flatout.forecast.step import LINK_ERROR
from flatout.words import rounded
from forecast_judge import (
    Case,
    factor_without,
    is_seen,
    judge,
    keys,
    saturating,
    scaling,
    widening,
)
from forecast_series import GRPC, NETWORKS, WORKER, Source, sources

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "forecast_accuracy.md"
ALL = ROOT / "bench" / "results" / "forecast_accuracy.md"
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

<!-- Made by bench/forecast_accuracy.py from bench/published_series/. -->

The model of [`flatout forecast`](forecast.md) is judged by series of training speed that others
have published. It is calibrated on the first rows of a series, and predicts the rows after them.
`python bench/forecast_accuracy.py` repeats this; `bench/results/forecast_accuracy.md` lists every
prediction with its error.

- The model was built on the series of two sources: {building}. The keys below are over the other
  series alone.
- The model is calibrated on each beginning of a series of two rows or more (of one, in series of
  two rows), and predicts all rows after it. Nothing is fitted to more than one series.
- Intervals are widened by the errors of all *other* series, never by the series' own.
- One error is the same for all series: links are {error:.0%} slower or faster at twice the timed
  ranks, and the same again at each further doubling. It was chosen so that intervals also hold on
  the synthetic series of `tests/bench/unseen.py`, whose physics is not the model's.
- A network reaches a share of its line rate: {bands}.
  Within a host the share is 0.1 to 0.9.

A prediction is *measured* where a row over several hosts was calibrated on, or there is only one
host. It is *given* where only the line rate of the network is known. Both kinds have their own
errors and their own widening.
"""

ALL_HEAD = """\
# Every prediction of the forecast's model

<!-- Made by bench/forecast_accuracy.py from bench/published_series/. -->

`docs/forecast_accuracy.md` explains the rules and has the keys. The model was corrected four times
after errors were known, each time from a source other than the rates of a series. The figures are
those before the correction.

1. Servers add up on CPUs; the model had a GPU's rate for Piz Daint. Jobs without tables paid the
   latency of sending rows. Errors 0.041 and 0.094, covered 0.904, 5 of 8 collapses predicted.
2. The sources' own scripts. Piz Daint's servers speak gRPC over TCP, not RDMA; TensorFlow's gRPC
   passes {grpc} GB/s ([tensorflow#6116](https://github.com/tensorflow/tensorflow/issues/6116)). A
   plain DataLoader had 8 workers for all GPUs of a host, each of which decodes {worker} images per
   second. TF2 ran one program on one host and another program on several hosts, so these are two
   series. Errors 0.042 and 0.095, covered 0.894, 6 of 8 collapses predicted.
3. For sizes that were timed, the forecast is the measured time. The model predicts larger sizes
   from the last measured one. Errors 0.042 and 0.073, covered 0.904, widened by 1.38 and 2.07.
4. NCCL's ring passes all ranks, so a host's link carries (p - 1) / p of the bytes for p ranks; the
   model had a ring of hosts. Gradients are more often sent as soon as they are ready than at the
   end. The error of links grows with each doubling of the timed ranks. Errors 0.038 and 0.068,
   covered 0.913, widened by 1.32 and 2.06.
"""


def pages() -> dict[Path, str]:
    """Return the text of both pages as Markdown."""
    cases = judge()
    building = [source.name for source in sources() if not source.series[0].is_judged]
    bands = ", ".join(f"{name} {low} to {high}" for name, (low, high) in NETWORKS.items())
    grpc = " to ".join(f"{rate / 1e9:g}" for rate in GRPC)
    worker = " to ".join(f"{rate:g}" for rate in WORKER)
    head = HEAD.format(building=" and ".join(building), bands=bands, error=LINK_ERROR)
    parts = [ALL_HEAD.format(grpc=grpc, worker=worker), *collapse_text(cases)]
    for source in sources():
        parts += source_text(source, cases)
    return {
        PAGE: "\n".join([head, *keys_text(cases)]) + "\n",
        ALL: "\n".join(parts) + "\n",
    }


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
        "## Series that saturate\n\nRows at which twice the devices gave less than 0.75 of twice "
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


def main(options: Sequence[str]) -> int:
    if "--worker" in options:
        print(f"{worker_rate():.0f}")
        return 0
    status = 0
    for path, text in pages().items():
        if "--check" not in options:
            path.write_text(text, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != text:
            print(f"{path.relative_to(ROOT)} is out of date: python bench/{Path(__file__).name}")
            status = 1
    return status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
