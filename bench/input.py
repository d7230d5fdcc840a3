"""From files to shuffled batches of arrays or tensors: rows per second of Flatout and its peers.

    python bench/input.py [--only libsvm jpeg-tfdata ...] [--restarts 3] [--json [FILE]]

LibSVM text, TFRecord, Criteo TSV, JPEG folders, data in memory, and Flatout's row cache. The files
are made first and lie in the page cache. Each peer runs once on one CPU (its name ends in -1) and
once on two (-2), with as many threads or processes; its batches are checked row by row. A key is
the smaller of both ratios.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import input_data
from flatout.measure import Interval, usable_cpus
from restarts import (
    PEERS,
    Peer,
    PeerFailed,
    Row,
    absence,
    each,
    ratio,
    run_in_turn,
    run_once,
    tell,
    versions,
)
from results import Key, Results, add_arguments, finish, interval_words, positive, rows_as_data
from startup import median_interval

sys.path.append(str(PEERS))
from input_job import BATCH, PARTS

FLATOUT, AGAIN, CACHED, OWN_TIME = "flatout", "flatout-again", "flatout-cached", "flatout-own-time"
OURS = (FLATOUT, AGAIN, CACHED, OWN_TIME)
ROWS, IMAGES, SAMPLES = 400_000, 640, 60_000


@dataclass(frozen=True)
class Entry:
    """A line of the table, for each number of CPUs.

    Args:
        kind: of the files.
        name: of the peer.
        script: below `bench/peers`.
        needs: modules without which it cannot run.
        form: which way of several.
        parts: how many of the files it reads; slow peers read some.
        remark: for the table.
    """

    kind: str
    name: str
    script: str
    needs: tuple[str, ...]
    form: str = ""
    parts: int = PARTS
    remark: str = ""


_NEEDS = ("torch", "flatout")
_WRITER = "tensorflow"  # of the TFRecord files
_PHOTOS = ("sklearn", "PIL")
ENTRIES = (
    Entry("libsvm", FLATOUT, "input_flatout.py", _NEEDS),
    Entry("libsvm", AGAIN, "input_flatout.py", _NEEDS),
    Entry("libsvm", "tfdata", "input_tfdata.py", ("tensorflow",), "batches", 4),
    Entry("libsvm", "tfdata-lines", "input_tfdata.py", ("tensorflow",), "lines", 1, "line by line"),
    Entry("libsvm", "sklearn", "input_sklearn.py", ("sklearn",), "", 2, "loads it all"),
    Entry("libsvm", "polars", "input_polars.py", ("polars",), remark="loads it all"),
    Entry("tfrecord", FLATOUT, "input_flatout.py", (*_NEEDS, _WRITER), remark="checks both CRCs"),
    Entry("tfrecord", CACHED, "input_flatout.py", (*_NEEDS, _WRITER), "cached", remark="row cache"),
    Entry("tfrecord", "tfdata", "input_tfdata.py", ("tensorflow",), remark="checks both CRCs"),
    Entry("tfrecord", "protobuf", "input_protobuf.py", ("tensorflow",), "", 2, "checks no CRC"),
    Entry("criteo", FLATOUT, "input_flatout.py", _NEEDS),
    Entry("criteo", "tfdata", "input_tfdata.py", ("tensorflow",), "", 4),
    Entry("criteo", "polars", "input_polars.py", ("polars",), remark="loads it all"),
    Entry("jpeg", FLATOUT, "input_flatout.py", (*_NEEDS, "simplejpeg", *_PHOTOS)),
    Entry("jpeg", AGAIN, "input_flatout.py", (*_NEEDS, "simplejpeg", *_PHOTOS)),
    Entry("jpeg", "tfdata", "input_tfdata.py", ("tensorflow", *_PHOTOS)),
    Entry("jpeg", "pil", "input_jpeg.py", _PHOTOS, "pil", remark="whole images"),
    Entry("jpeg", "pil-draft", "input_jpeg.py", _PHOTOS, "draft"),
    Entry("jpeg", "opencv", "input_jpeg.py", ("cv2", *_PHOTOS), "opencv"),
    Entry("memory", FLATOUT, "input_flatout.py", _NEEDS),
    Entry("memory", "dataloader", "input_dataloader.py", ("torch",), "samples"),
    Entry(
        "memory",
        "dataloader-batches",
        "input_dataloader.py",
        ("torch",),
        "batches",
        remark="gathers itself",
    ),
    Entry("memory", "tfdata", "input_tfdata.py", ("tensorflow",)),
    Entry("memory", "grain", "input_grain.py", ("grain",), "samples"),
    Entry(
        "memory",
        "grain-batches",
        "input_grain.py",
        ("grain",),
        "batches",
        remark="gathers itself",
    ),
)
OWN = Entry("memory", OWN_TIME, "input_own_time.py", _NEEDS, remark="a batch")
VERIFYING = Entry("memory", "verifying", "input_verifying.py", _NEEDS)
PSNR = Entry("jpeg", "psnr", "input_psnr.py", (*_NEEDS, "simplejpeg", *_PHOTOS))


def cpu_sets() -> list[list[int]]:
    """The first CPU, and the first two where the process may use two."""
    allowed = sorted(os.sched_getaffinity(0))
    return [allowed[:cpus] for cpus in (1, 2) if cpus <= min(len(allowed), usable_cpus())]


def name_of(entry: Entry, cpus: int) -> str:
    return f"{entry.kind}-{entry.name}-{cpus}"


def peers(data: Path, seconds: float, sets: Sequence[Sequence[int]]) -> list[Peer]:
    """Those of a kind together, so that they run close in time."""
    chosen = [(entry, cpus) for entry in ENTRIES for cpus in sets]
    return [_peer(entry, cpus, data, seconds) for entry, cpus in [*chosen, (OWN, sets[0])]]


def _peer(entry: Entry, cpus: Sequence[int], data: Path, seconds: float) -> Peer:
    arguments = ["--data", str(data), "--kind", entry.kind, "--parts", str(entry.parts)]
    arguments += ["--cpus", ",".join(map(str, cpus)), "--seconds", str(seconds)]
    if entry.form:
        arguments += ["--form", entry.form]
    return Peer(name_of(entry, len(cpus)), entry.script, tuple(arguments), entry.needs)


# -- keys ----------------------------------------------------------------------------------------


def against(
    rows: Mapping[str, Row], kind: str, others: Sequence[str], cpu_counts: Iterable[int]
) -> tuple[Interval | str, str]:
    """The fastest of `others` against Flatout: the smallest ratio over CPUs, and words on each."""
    found, words = [], []
    for cpus in cpu_counts:
        names = [f"{kind}-{other}-{cpus}" for other in others]
        measured = [name for name in names if rows[name].measured]
        if not measured:
            return f"{names[0]}: {rows[names[0]].reason}", ""
        best = min(measured, key=lambda name: median(rows[name].seconds))
        one = ratio(rows, best, f"{kind}-{FLATOUT}-{cpus}")
        if isinstance(one, str):
            return one, ""
        found.append(one)
        words.append(f"{one.mid:.3g} against {best}")
    return min(found, key=lambda interval: interval.mid), ", ".join(words)


def peer_names(kind: str) -> list[str]:
    return [entry.name for entry in ENTRIES if entry.kind == kind and entry.name not in OURS]


def speed_keys(rows: Mapping[str, Row], cpu_counts: Sequence[int]) -> list[Key]:
    def key(name: str, kind: str, others: Sequence[str], at_least: float | None = None) -> Key:
        found, note = against(rows, kind, others, cpu_counts)
        return Key(name, found, at_least=at_least, note=note)

    return [
        key("libsvm_vs_best_peer", "libsvm", peer_names("libsvm"), 3),
        key("libsvm_vs_tfdata", "libsvm", ["tfdata", "tfdata-lines"], 10),
        key("tfrecord_vs_tfdata", "tfrecord", ["tfdata"], 8),
        key("criteo_vs_best_peer", "criteo", peer_names("criteo"), 5),
        key("jpeg_vs_tfdata", "jpeg", ["tfdata"], 1.25),
        key("jpeg_vs_pil_draft", "jpeg", ["pil-draft"], 1.4),
        key("memory_vs_dataloader", "memory", ["dataloader"], 15),
        key("memory_vs_dataloader_batches", "memory", ["dataloader-batches"]),
        row_cache_key(rows, cpu_counts),
        scaling_key(rows, cpu_counts),
        own_time_key(rows[name_of(OWN, 1)]),
        key("libsvm_vs_itself", "libsvm", [AGAIN]),
        key("jpeg_vs_itself", "jpeg", [AGAIN]),
    ]


def row_cache_key(rows: Mapping[str, Row], cpu_counts: Sequence[int]) -> Key:
    """Rows per second from the row cache against those from the TFRecord files."""
    found = [ratio(rows, f"tfrecord-{FLATOUT}-{n}", f"tfrecord-{CACHED}-{n}") for n in cpu_counts]
    return _smallest("row_cache_vs_tfrecord", found, [f"-{n}" for n in cpu_counts], 1)


def scaling_key(rows: Mapping[str, Row], cpu_counts: Sequence[int]) -> Key:
    """Flatout on two CPUs against Flatout on one."""
    if 2 not in cpu_counts:
        return Key("scaling_min", "there is one CPU", at_least=1.5)
    kinds = ["libsvm", "tfrecord", "criteo", "jpeg"]
    found = [ratio(rows, f"{kind}-{FLATOUT}-1", f"{kind}-{FLATOUT}-2") for kind in kinds]
    return _smallest("scaling_min", found, kinds, 1.5)


def _smallest(
    name: str, found: Sequence[Interval | str], words: Sequence[str], at_least: float
) -> Key:
    """A key that all of `found` have to meet."""
    for reason in found:
        if isinstance(reason, str):
            return Key(name, reason, at_least=at_least)
    ratios = {
        word: one for word, one in zip(words, found, strict=True) if isinstance(one, Interval)
    }
    note = ", ".join(f"{word} {one.mid:.3g}" for word, one in ratios.items())
    return Key(name, min(ratios.values(), key=lambda one: one.mid), at_least=at_least, note=note)


def own_time_key(row: Row) -> Key:
    name = "input_us_in_memory"
    if not row.measured:
        return Key(name, f"{row.peer.name}: {row.reason}", at_most=5)
    if (least := min(row.seconds)) <= 0:
        reason = f"a restart gave {least * 1e6:.2g} us, a difference made negative by noise"
        return Key(name, reason, at_most=5)
    microseconds = median_interval([seconds * 1e6 for seconds in row.seconds])
    return Key(name, microseconds, at_most=5, note="in each batch, besides the gathering")


def psnr_key(peer: Peer) -> Key:
    """What the reduced decoding changes, by comparison with Pillow's antialiased resizing."""
    reason, found = absence(peer), {}
    if not reason:
        try:
            found = run_once(peer)
        except PeerFailed as error:
            reason = f"failed: {error}"
    if reason:
        return Key("jpeg_psnr", reason, at_least=43)
    each = "; ".join(
        f"{name} {one['psnr']:.1f}, worst image {one['worst']:.1f}" for name, one in found.items()
    )
    note = "dB over all images, against decoding whole and Pillow's antialiased BILINEAR"
    return Key("jpeg_psnr", found["BILINEAR"]["psnr"], at_least=43, note=f"{note} ({each})")


def verifying_keys(peer: Peer) -> list[Key]:
    """What comparing checksums takes of a first pass over a row cache."""
    names = {"disk": "verifying_share", "memory": "verifying_share_in_memory"}
    reason, found = absence(peer), {}
    if not reason:
        try:
            found = run_once(peer)
        except PeerFailed as error:
            reason = f"failed: {error}"
    if reason:
        return [_verifying_key(name, reason, "") for name in names.values()]
    words = {"disk": "the disk", "memory": "the system's memory"}
    return [
        _verifying_key(
            name,
            found[at]["share"],
            f"of the first pass over rows that come from {words[at]} at "
            f"{found[at]['gb_per_s']:.2f} GB/s",
        )
        for at, name in names.items()
    ]


def _verifying_key(name: str, found: float | str, note: str) -> Key:
    # From memory a pass has nothing to wait for, so that there the share is only shown.
    return Key(name, found, at_most=0.03 if name == "verifying_share" else None, note=note)


# -- the bench -----------------------------------------------------------------------------------


def reference_of(name: str) -> str:
    """The row of Flatout that a row is compared with: the same files and CPUs."""
    kind, rest = name.split("-", 1)
    peer, cpus = rest.rsplit("-", 1)
    return name if peer == OWN.name else f"{kind}-{FLATOUT}-{cpus}"


def lines(rows: Mapping[str, Row]) -> list[list[str]]:
    remarks = {f"{entry.kind}-{entry.name}": entry.remark for entry in [*ENTRIES, OWN]}
    made = []
    for name, row in rows.items():
        if not row.measured:
            made.append([name, "", "", "", "", row.reason])
            continue
        cells = _own_time(row) if row.peer.script == OWN.script else _rates(rows, row)
        made.append([name, *cells, remarks[name.rsplit("-", 1)[0]]])
    return made


def _rates(rows: Mapping[str, Row], row: Row) -> list[str]:
    name = row.peer.name
    size = BATCH[name.split("-", 1)[0]]
    compared = ratio(rows, name, reference_of(name))
    return [
        rate(size / median(row.seconds)),
        f"{rate(size / max(row.seconds))} .. {rate(size / min(row.seconds))}",
        rate(size / median(row.first_seconds)),
        "" if isinstance(compared, str) else interval_words(compared),
    ]


def rate(rows_per_second: float) -> str:
    """Such as "4.768M" or "95.56k"."""
    for unit, letter in ((1e6, "M"), (1e3, "k")):
        if rows_per_second >= unit:
            return f"{rows_per_second / unit:.4g}{letter}"
    return f"{rows_per_second:.4g}"


def _own_time(row: Row) -> list[str]:
    middle, least, most = (call(row.seconds) * 1e6 for call in (median, min, max))
    return [f"{middle:.2f} us", f"{least:.2f} .. {most:.2f} us", "", ""]


def as_data(rows: Mapping[str, Row]) -> list[dict[str, Any]]:
    found = []
    for name, row in rows.items():
        reference = reference_of(name)
        both = {name: row, reference: rows[reference]}
        found.append(rows_as_data(both, reference)[0])
    return found


REMARKS = (
    "-1 has one CPU, -2 two, and as many threads or processes; the CPUs are the same for all.",
    "first pass: with opening, indexing, filling the cache, or building the graph.",
    "All read and parse their files in each pass, but flatout keeps the files' bytes where they "
    "fit in memory, and an index of them.",
    "flatout, sklearn, polars and protobuf shuffle all rows; tf.data shuffles windows of four "
    "batches. sklearn and polars load all files in each pass.",
    "dataloader and grain make batches of samples; where they gather themselves, the user's "
    "Dataset or source makes whole batches. flatout-own-time is what the pipeline adds to a batch.",
)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, restarts=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="timed at least in a process")
    parser.add_argument("--rows", type=positive, default=ROWS, help="of text and records")
    parser.add_argument("--images", type=positive, default=IMAGES, help="JPEG files")
    parser.add_argument("--samples", type=positive, default=SAMPLES, help="in memory")
    parser.add_argument(
        "--only",
        nargs="+",
        default=(),
        metavar="NAME",
        help="peers whose names begin so, or verifying",
    )
    return parser.parse_args()


def chosen_names(chosen: Sequence[Peer], begins: Sequence[str]) -> list[str]:
    """The names that begin with one of these.

    Raises:
        SystemExit: one of them begins no name.
    """
    for begin in begins:
        if not any(peer.name.startswith(begin) for peer in chosen):
            raise SystemExit(f"--only {begin}: no peer's name begins so")
    return [peer.name for peer in chosen if peer.name.startswith(tuple(begins))]


def make_data(data: Path, wanted: Iterable[Peer], counts: Mapping[str, int]) -> None:
    """The files that these peers need, unless they cannot run anyway."""
    for kind in dict.fromkeys(peer.name.split("-", 1)[0] for peer in wanted if not absence(peer)):
        tell(f"making {counts[kind]:,} rows of {kind}")
        input_data.make(kind, data / kind, counts[kind])
    os.sync()  # what is still being written to the disk would take a CPU from the first peers


def main() -> int:
    arguments = read_arguments()
    rows = dict.fromkeys(("libsvm", "tfrecord", "criteo"), arguments.rows)
    counts = {**rows, "jpeg": arguments.images, "memory": arguments.samples}
    sets = cpu_sets()
    with tempfile.TemporaryDirectory(prefix="flatout-bench-") as folder:
        data = Path(folder)
        chosen = peers(data, arguments.seconds, sets)
        only = chosen_names(chosen, [one for one in arguments.only if one != VERIFYING.name])
        if arguments.only and not only:
            only = [VERIFYING.name]
        needed = [peer for peer in chosen if not only or peer.name in only]
        each(["making the files"], lambda part: make_data(data, needed, counts))
        found = run_in_turn(chosen, restarts=arguments.restarts, only=only, tell=tell)
        psnr = Key("jpeg_psnr", "left out by --only", at_least=43)
        verifying = [_verifying_key("verifying_share", "left out by --only", "")]
        if not arguments.only or VERIFYING.name in arguments.only:
            tell("measuring what checksums take")
            verifying = verifying_keys(_peer(VERIFYING, sets[-1], data, arguments.seconds))
        if (data / "jpeg").exists():
            psnr = psnr_key(_peer(PSNR, sets[-1], data, arguments.seconds))
    cpu_counts = [len(cpus) for cpus in sets]
    results = Results(
        title=f"Files to shuffled batches; restarts of each: {arguments.restarts}",
        headers=["", "rows/s", "slowest .. fastest", "first pass", "time / flatout's", ""],
        lines=lines(found),
        remarks=REMARKS,
        keys=[*speed_keys(found, cpu_counts), *verifying, psnr],
        data={
            "rows": as_data(found),
            "counts": counts,
            "versions": versions(chosen),
        },
    )
    return finish(results, arguments)


if __name__ == "__main__":
    sys.exit(main())
