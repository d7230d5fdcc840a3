"""The number of ranks with which a script is fastest, measured: `flatout run --devices auto`.

The script is started twice on each number of ranks, in ascending and then in descending order, and
is ended inside its first fit. More ranks are chosen only if their advantage exceeds the difference
between two equal measurements.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from flatout.cache_folder import cache_folder, keep_text, kept_text
from flatout.errors import WorldError
from flatout.measure import fingerprint
from flatout.words import counted, rounded
from flatout.world.nodes import device_asked, devices_here
from flatout.world.place import RANK_TRIAL, RANKS_TRIED, without_launcher

# Maximum seconds until a script reports: it may load its data first, and measure its settings.
_PATIENCE_S = 300.0
_LOOK_EVERY_S = 0.05
# Smallest ratio of two speeds that counts as a difference.
_FLOOR = 1.03


@dataclass(frozen=True)
class Speed:
    """Steps per second on a number of ranks, measured twice."""

    ranks: int
    first: float
    second: float

    @property
    def mean(self) -> float:
        return (self.first + self.second) / 2

    @property
    def noise(self) -> float:
        """The ratio of the two measurements, at least 1."""
        low, high = sorted((self.first, self.second))
        return high / low


def candidates() -> list[int]:
    """Return the numbers of ranks to try here: powers of two, and one for each device."""
    # Ranks that share a GPU are slower than one.
    most = 1 if device_asked().startswith("cuda:") else devices_here()[0]
    return sorted({most, *(2**power for power in range(most.bit_length()) if 2**power <= most)})


def choose(
    command: Callable[[int], Sequence[str]], script: Path | None, say: Callable[[str], None]
) -> int:
    """Return the number of ranks on this node with which the script trains fastest."""
    tried = candidates()
    if len(tried) == 1:
        return 1
    kept = _kept_under(command(0), script)
    with suppress(OSError, ValueError):
        data = json.loads(kept_text("ranks", kept) or "")
        ranks = int(data["ranks"])
        os.environ[RANKS_TRIED] = json.dumps(data.get("steps_per_s", {}))
        say(f"{counted(ranks, 'rank')}, as measured before ({cache_folder() / 'ranks' / kept})")
        return ranks
    say(f"measuring {', '.join(map(str, tried))} ranks, each twice; the script is ended in its fit")
    there = [_measure(command(ranks), ranks) for ranks in tried]
    back = [_measure(command(ranks), ranks) for ranks in reversed(tried)][::-1]
    speeds = [Speed(*times) for times in zip(tried, there, back, strict=True)]
    chosen = fastest(speeds)
    cpus = fingerprint().cpus
    for speed in speeds:
        share = f" x {rounded(cpus / speed.ranks)} CPU" if not fingerprint().gpus else ""
        mark = "  <- chosen" if speed is chosen else ""
        ratio = speed.mean / speeds[0].mean
        say(
            f"{counted(speed.ranks, 'rank')}{share}: {rounded(speed.mean, 4)} steps/s, "
            f"{ratio:.2f}x, noise {speed.noise - 1:.0%}{mark}"
        )
    steps_per_s = {str(speed.ranks): speed.mean for speed in speeds}
    os.environ[RANKS_TRIED] = json.dumps(steps_per_s)
    with suppress(OSError):
        found = {"ranks": chosen.ranks, "steps_per_s": steps_per_s}
        keep_text("ranks", kept, json.dumps(found))
    return chosen.ranks


def fastest(speeds: Sequence[Speed]) -> Speed:
    """Return the fastest speed if it beats fewer ranks by more than equal measurements differ."""
    floor = max(_FLOOR, *(speed.noise for speed in speeds))
    chosen = speeds[0]
    for speed in speeds[1:]:
        if speed.mean > chosen.mean * floor:
            chosen = speed
    return chosen


def _measure(command: Sequence[str], ranks: int) -> float:
    with tempfile.TemporaryDirectory(prefix="flatout-ranks-") as folder:
        steps_file, output = Path(folder) / "steps", Path(folder) / "output"
        with output.open("wb") as out:
            process = psutil.Popen(
                list(command),
                env={**without_launcher(os.environ), RANK_TRIAL: str(steps_file)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
            try:
                ended = _wait_for(steps_file, process)
            finally:
                _end(process)
        if steps_file.exists() and (rate := float(steps_file.read_text())) > 0:
            return rate
        words = output.read_text(errors="replace").strip().splitlines()[-15:]
        what = f"ended with exit code {process.returncode}" if ended else "went on without an end"
        raise WorldError(
            f"on {counted(ranks, 'rank')} the script {what} and did not train: "
            "nothing could be measured",
            where="\n  ".join(["its last words:", *words]) if words else "",
            do="see that it trains with flatout.Trainer or flatout.Loop, or say --devices N",
        )


def _wait_for(told: Path, process: psutil.Popen) -> bool:
    """Wait for the report or the end of the script, and return whether it has ended."""
    deadline = time.monotonic() + _PATIENCE_S
    while not told.exists() and time.monotonic() < deadline:
        if process.poll() is not None:
            return True
        time.sleep(_LOOK_EVERY_S)
    return False


def _end(process: psutil.Popen) -> None:
    """End the script and all processes that it has started, at once: it must not save anything."""
    with suppress(psutil.NoSuchProcess):
        process.suspend()  # an agent would restart killed ranks
        below = process.children(recursive=True)
        for child in below:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        process.kill()
        psutil.wait_procs(below, timeout=10)
    process.wait()


def _kept_under(command: Sequence[str], script: Path | None) -> str:
    text = script.read_text(errors="replace") if script is not None else ""
    asked = [os.environ.get(name, "") for name in ("FLATOUT_SET", "FLATOUT_RECIPE")]
    parts = [*command, os.getcwd(), text, fingerprint().digest, *asked]
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]
    return f"{digest}.json"
