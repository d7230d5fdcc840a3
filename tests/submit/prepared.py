"""Data that a job prepares: small files of two classes are joined, balanced, shuffled, sharded."""

import random
import subprocess
import sys
from contextlib import suppress

import psutil
from jobs import until

import flatout

SHARDS, FILES, ROWS = 24, 48, 3000
OPTIONS = ("--balance", "class", "--shuffle", "1", "--shards", str(SHARDS))
MAIN = [sys.executable, "-c", "from flatout.cli.main import main; main()"]


def small_files(folder):
    """LibSVM files, each of one class, of which one is three times as frequent as the other."""
    folder.mkdir()
    draw = random.Random(1)
    values = [" ".join(f"{at}:{draw.random():.4f}" for at in range(1, 33)) for _ in range(ROWS)]
    for number in range(FILES):
        label = int(number % 4 == 0)
        text = "".join(f"{label} {row} {number + 100}:1\n" for row in values)
        (folder / f"{label}-{number}.svm").write_text(text)
    return folder


def command(source, target):
    """What is submitted."""
    return ["flatout", "data", "convert", f"{source}/*.svm", str(target), *OPTIONS]


def shards(target):
    """The files that are written, and when each was."""
    written = {}
    for path in target.parent.glob(f"{target.stem}-*{target.suffix}"):
        with suppress(FileNotFoundError):
            written[path.name] = path.stat().st_mtime_ns
    return written


def kill_in_the_middle(target, least=4):
    """Kill what prepares the data when some shards are there; those that had been noted."""
    until(lambda: len(shards(target)) >= least, 300)
    processes = [
        one
        for one in psutil.process_iter(["cmdline", "name"])
        if {str(target), "convert"} <= set(one.info["cmdline"] or ())
        and one.info["name"].startswith(("python", "flatout"))
    ]
    assert processes
    for one in processes:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    written = shards(target)
    assert least <= len(written) < SHARDS
    written.pop(max(written, key=written.__getitem__))  # which may not have been
    return written


def check(source, target, written):
    """What was there was not written again, and all is as if nothing had been killed."""
    after = shards(target)
    assert len(after) == SHARDS
    assert {name: after[name] for name in written} == written
    undisturbed = target.with_name(f"undisturbed{target.suffix}")
    again = [*MAIN, *command(source, undisturbed)[1:]]
    subprocess.run(again, check=True, capture_output=True, timeout=300)
    for name in after:
        other = target.with_name(name.replace(target.stem, undisturbed.stem, 1))
        assert target.with_name(name).read_bytes() == other.read_bytes()
    files = [str(target.with_name(name)) for name in sorted(after)]
    schema = str(target.with_name(f"_{target.name}.toml"))
    report = flatout.data.inspect(files, schema=schema, progress=False)
    frequent = FILES * ROWS * 3 // 4
    assert report.classes == {"0": frequent, "1": frequent}
