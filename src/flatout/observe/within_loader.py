"""Time of a loader, measured within its first batches in the process that makes them.

A thread samples the stack of the thread that makes batches, every two milliseconds. The packages in
the stack reveal whether it reads, decodes, transforms or collates. Such samples favor lines that
release the GIL, so times of lines are measured separately, while one batch is made. Workers write
their measurements to a file in the observer's folder.
"""

from __future__ import annotations

import builtins
import io
import json
import os
import re
import stat
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any

from flatout.hooks import Hook, wrap
from flatout.observe.generators import Draws, drawn_alike
from flatout.observe.line_clock import LineClock
from flatout.observe.observation import Loader, Site
from flatout.observe.sites import is_users, line_of, read, site_of

FOLDER, LOADER = "FLATOUT_OBSERVE_FOLDER", "FLATOUT_OBSERVE_LOADER"
# _LOOKS: number of stack samples after which a probe is complete; _BATCHES: number of batches after
# which a probe is complete; _EVERY_S: seconds between two samples.
_LOOKS, _BATCHES, _EVERY_S = 300, 48, 0.002
# Numbers of batches after which a worker writes its measurements; a worker also writes at its end.
_TOLD = (1, 2, 3, 4, 16)
# Maximum number of the user's lines that are reported.
_LINES = 10
# Number of the batch (from 0) whose lines are timed by a trace function.
_TIMED_BATCH = 2
# _FILES_BATCH: number of batches after which open files are listed; _LARGE: minimum bytes of a file
# in that list.
_FILES_BATCH, _LARGE = 2, 2**20
_DECODES = re.compile(r"imread|imdecode|decode|Image\.open|\.convert\(|soundfile|torchaudio\.load")
_READS = re.compile(r"open\(|\.read|np\.load|np\.fromfile|loadtxt|torch\.load|read_file|h5py")
_DECODERS = ("torchvision.io", "imageio")
# Functions of Pillow that change a decoded image.
_CHANGES = ("resize", "crop", "rotate", "transpose", "filter", "transform", "point", "thumbnail")
_CHANGERS = ("PIL.ImageEnhance", "PIL.ImageFilter", "PIL.ImageOps", "PIL.ImageChops")


class Probe:
    """Measurements of one loader's first batches in one process."""

    def __init__(self, after_batch: Callable[[], None] = lambda: None) -> None:
        self.after_batch = after_batch
        self.batches = self.samples = self.opens = 0
        self.fetch_ns = self.collate_ns = 0
        self.sample_bytes: int | None = None
        self.files: list[tuple[str, int]] | None = None
        self.lanes: Counter[str] = Counter()
        self.lines: Counter[tuple[str, int]] = Counter()
        self.decoding: Counter[tuple[str, int]] = Counter()
        self.looks = 0
        self.timed: LineClock | None = None
        self.is_collating = False

    def clock(self) -> LineClock | None:
        """Return a clock for the lines of the next batch; None if that batch is not timed."""
        if self.batches != _TIMED_BATCH or sys.gettrace() is not None:
            return None
        self.timed = LineClock()
        return self.timed

    @property
    def is_done(self) -> bool:
        """True once enough was measured."""
        return self.looks >= _LOOKS or self.batches >= _BATCHES

    def look(self, frame: FrameType | None) -> None:
        """Count one stack sample, whose innermost frame is `frame`."""
        self.looks += 1
        if self.is_collating:
            return
        lane = _lane_of(frame)
        self.lanes[lane] += 1
        site = site_of(frame, outermost="torch.utils.data._utils.fetch")
        if site is not None:
            self.lines[site.file, site.line] += 1
            self.decoding[site.file, site.line] += lane == "decode"

    def as_dict(self) -> dict[str, Any]:
        """Return plain data: times per batch in ms, and the lines' shares of the time."""
        batches = max(1, self.batches)
        made = (self.fetch_ns - self.collate_ns) / batches / 1e6
        looks = max(1, self.lanes.total())
        lanes = {lane: made * count / looks for lane, count in self.lanes.items()}
        if not lanes:
            lanes = {"transform": made}
        lines, whole = self.lines, looks
        if self.timed is not None and self.timed.ns:
            lines, whole = self.timed.ns, self.timed.whole_ns
        return {
            "batches": self.batches,
            "lanes_ms": {
                "read": lanes.get("read", 0.0),
                "decode": lanes.get("decode", 0.0),
                "transform": lanes.get("transform", 0.0),
                "collate": self.collate_ns / batches / 1e6,
            },
            "opens": self.opens,
            "samples": self.samples,
            "sample_bytes": self.sample_bytes,
            "files": self.files,
            "decodes_at": next((place for place, n in self.decoding.most_common(1) if n), None),
            "lines": [[file, line, part / whole] for (file, line), part in lines.items()],
        }


def _lane_of(frame: FrameType | None) -> str:
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.startswith("torch.utils.data"):
            return "transform"
        if name == "PIL.ImageFile" or name.endswith("ImagePlugin") or name.startswith(_DECODERS):
            return "decode"
        changes = name.startswith("PIL.") and frame.f_code.co_name in _CHANGES
        if changes or name.startswith(("torchvision.transforms", "albumentations", *_CHANGERS)):
            return "transform"
        line = "" if name.startswith("PIL.") else _line(frame)
        if _DECODES.search(line):
            return "decode"
        if _READS.search(line):
            return "read"
        if is_users(frame.f_code.co_filename):
            # The function's name may say that it decodes, even if its current line does not.
            return "decode" if "decode" in frame.f_code.co_name else "transform"
        frame = frame.f_back
    return "transform"


def _line(frame: FrameType) -> str:
    import linecache

    return linecache.getline(frame.f_code.co_filename, line_of(frame))


class Looker(threading.Thread):
    """Thread that samples the stack of its creating thread, while that thread makes batches."""

    def __init__(self, probe: Probe) -> None:
        super().__init__(name="flatout-loader", daemon=True)
        self.probe = probe
        self._thread = threading.get_ident()
        self.is_making = threading.Event()

    def run(self) -> None:
        """Sample until the probe is complete."""
        while not self.probe.is_done:
            self.is_making.wait(1.0)
            if self.is_making.is_set():
                self.probe.look(sys._current_frames().get(self._thread))
            time.sleep(_EVERY_S)


def watch_fetch(
    module: Any, probe_of: Any, quick: Callable[[Any, Any], Any] = lambda original, hook: hook
) -> list[Hook]:
    """Hook into torch.utils.data._utils.fetch.

    Args:
        module: that module.
        probe_of: function that returns a Probe and a Looker for a fetcher, or None.
        quick: function that returns the replacement of a function, from the function and its hook.
    """

    def around(original: Any) -> Any:
        return quick(original, probed(original, probe_of))

    owners = (module._MapDatasetFetcher, module._IterableDatasetFetcher)
    return [wrap(owner, "fetch", "observe", around) for owner in owners]


def probed(original: Any, probe_of: Any) -> Any:
    """Return a fetch function that is measured as long as `probe_of` gives a Probe and Looker."""

    def fetch(self: Any, index: Any) -> Any:
        result = probe_of(self)
        if result is None:
            return original(self, index)
        probe, looker = result
        collate = self.collate_fn
        opened = builtins.open
        self.collate_fn = _timed_collate(collate, probe)
        builtins.open = io.open = _counted(opened, probe)
        clock = probe.clock()
        looker.is_making.set()
        began = time.perf_counter_ns()
        if clock is not None:
            clock.start()
        try:
            return original(self, index)
        finally:
            if clock is not None:
                clock.stop()
            probe.fetch_ns += time.perf_counter_ns() - began
            probe.batches += 1
            looker.is_making.clear()
            self.collate_fn = collate
            builtins.open = io.open = opened
            if probe.batches == _FILES_BATCH:
                probe.files = files_being_read()
            probe.after_batch()

    return fetch


def _timed_collate(collate: Any, probe: Probe) -> Any:
    def timed(samples: Any) -> Any:
        if isinstance(samples, list) and samples:
            probe.samples += len(samples)
            if probe.sample_bytes is None:
                probe.sample_bytes = size_of(samples[0])
        probe.is_collating = True
        began = time.perf_counter_ns()
        try:
            return collate(samples)
        finally:
            probe.collate_ns += time.perf_counter_ns() - began
            probe.is_collating = False

    return timed


def _counted(opened: Any, probe: Probe) -> Any:
    @wraps(opened)
    def counting(*args: Any, **kwargs: Any) -> Any:
        probe.opens += 1
        return opened(*args, **kwargs)

    return counting


def watch_workers(module: Any, folder: Path) -> None:
    """Hook into torch.utils.data._utils.worker: workers write their measurements to `folder`."""
    os.environ[FOLDER] = str(folder)
    module._flatout_original = module._worker_loop
    module._worker_loop = worker_loop


def worker_loop(*args: Any, **kwargs: Any) -> None:
    """Replace torch's _worker_loop in a worker; spawned workers find this function by its name."""
    from torch.utils.data._utils import fetch, worker

    original: Any = getattr(worker, "_flatout_original", worker._worker_loop)
    folder, loader = os.environ.get(FOLDER), os.environ.get(LOADER)
    if folder and loader:
        _probe_worker(fetch, Path(folder) / f"loader-{loader}-{os.getpid()}.json")
    original(*args, **kwargs)


def _probe_worker(module: Any, path: Path) -> None:
    result: list[tuple[Probe, Looker]] = []

    def probe_of(fetcher: Any) -> tuple[Probe, Looker] | None:
        if not result:
            draws = Draws(fetcher.dataset)

            def tell() -> None:
                draws.look()
                if probe.is_done or probe.batches in _TOLD:
                    record = {**probe.as_dict(), "random": draws.states}
                    path.write_text(json.dumps(record), encoding="utf-8")

            probe = Probe(tell)
            result.append((probe, Looker(probe)))
            result[0][1].start()
        return None if result[0][0].is_done else result[0]

    for owner in (module._MapDatasetFetcher, module._IterableDatasetFetcher):
        owner.fetch = probed(getattr(owner.fetch, "__wrapped__", owner.fetch), probe_of)


def gather(folder: Path, loader: int) -> list[dict[str, Any]]:
    """Return the records of a loader's workers, in the order in which the workers began."""
    paths = sorted(folder.glob(f"loader-{loader}-*.json"), key=lambda path: path.stat().st_ctime)
    records = []
    for path in paths:
        try:
            records.append(json.loads(path.read_text(encoding="utf-8")))
        except ValueError:
            continue  # the worker was killed while it wrote the file
        finally:
            path.unlink()
    return records


def fill(facts: Loader, records: list[dict[str, Any]]) -> None:
    """Add the records of one or more processes to the facts of their loader."""
    batches = sum(part["batches"] for part in records)
    if not batches:
        return
    for lane in ("read", "decode", "transform", "collate"):
        ms = sum(part["lanes_ms"][lane] * part["batches"] for part in records)
        facts.lanes_ms[lane] = ms / batches
    samples = sum(part["samples"] for part in records)
    if samples:
        facts.opens_per_sample = sum(part["opens"] for part in records) / samples
    facts.sample_bytes = next((p["sample_bytes"] for p in records if p["sample_bytes"]), None)
    looked = [part["files"] for part in records if part["files"] is not None]
    if looked:
        facts.open_files = sorted({(path, size) for files in looked for path, size in files})
    lines: dict[Site, float] = {}
    for part in records:
        for file, line, share in part["lines"]:
            site = read(Site(file, line))
            lines[site] = lines.get(site, 0.0) + share * part["batches"] / batches
    decoding = Counter(tuple(p["decodes_at"]) for p in records if p.get("decodes_at"))
    facts.decodes_at = next((read(Site(*place)) for place, _ in decoding.most_common(1)), None)
    facts.hot = sorted(lines.items(), key=lambda value: -value[1])[:_LINES]
    of_workers = [part["random"] for part in records if "random" in part][: facts.num_workers]
    have_drawn = [states for states in of_workers if len(states) > 1]
    if have_drawn and len(have_drawn) == facts.num_workers:
        facts.worker_draws, facts.worker_hashes = drawn_alike(of_workers)


def files_being_read() -> list[tuple[str, int]] | None:
    """Return large files that this process has open for reading only, with their bytes."""
    result = {}
    try:
        for name in os.listdir("/proc/self/fd"):
            if not name.isdecimal():
                continue
            try:
                facts = os.fstat(int(name))
                told = Path(f"/proc/self/fdinfo/{name}").read_text()
                path = os.readlink(f"/proc/self/fd/{name}")
            except OSError:
                continue  # the descriptor of the listing itself
            flags = int(re.findall(r"^flags:\s*(\d+)", told, re.MULTILINE)[0], 8)
            is_read = flags & os.O_ACCMODE == os.O_RDONLY
            if stat.S_ISREG(facts.st_mode) and is_read and facts.st_size >= _LARGE:
                result[path] = facts.st_size
    except (OSError, IndexError):
        return None
    return sorted(result.items())


def size_of(batch: Any, depth: int = 0) -> int | None:
    """Return the bytes of the arrays in nested lists, tuples and dicts; None without any."""
    if hasattr(batch, "nbytes"):
        return int(batch.nbytes)
    if depth > 4:
        return None
    parts = batch.values() if isinstance(batch, dict) else batch
    if not isinstance(batch, (dict, list, tuple)):
        return None
    sizes = [size for part in parts if (size := size_of(part, depth + 1)) is not None]
    return sum(sizes) if sizes else None


def first_tensor(batch: Any, depth: int = 0) -> Any:
    """Return the first tensor in nested lists, tuples and dicts; None without any.

    A tensor of 16-bit numbers is returned as float32, since numpy has no bfloat16.
    """
    if hasattr(batch, "is_floating_point"):
        return batch if batch.dtype.itemsize != 2 else batch.float()
    if depth > 4 or not isinstance(batch, (dict, list, tuple)):
        return None
    parts = batch.values() if isinstance(batch, dict) else batch
    result = (first_tensor(part, depth + 1) for part in parts)
    return next((item for item in result if item is not None), None)
