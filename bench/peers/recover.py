"""How long two ranks train nothing after `kill -9` of one of them, under `flatout run`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

JOB = Path(__file__).with_name("recover_job.py")
# The step after which a rank is killed, some steps after a checkpoint.
KILL_AT = 50
PATIENCE_S = 300


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rank", type=int, default=1, help="which is killed")
    return parser.parse_args()


def lines_of(file: str) -> list[str]:
    try:
        return Path(file).read_text().splitlines()
    except OSError:
        return []


def until_step(rank: int, again: int, steps: int, command: subprocess.Popen[bytes]) -> float:
    """When a rank that was started `again` times has made so many steps."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and command.poll() is None:
        found = [line for line in lines_of(f"steps-{rank}-{again}") if line.count(".") == 1]
        if len(found) >= steps:
            return float(found[steps - 1].split()[1])
        time.sleep(0.002)
    raise SystemExit(f"rank {rank}: {steps} steps were not made")


def process_of(rank: int, command: subprocess.Popen[bytes]) -> psutil.Process:
    for child in psutil.Process(command.pid).children():
        if child.environ().get("RANK") == str(rank):
            return child
    raise SystemExit(f"rank {rank} is not there")


def seconds_of_import() -> float:
    """To import torch, in its own process."""

    def seconds(code: str) -> float:
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", code], check=True)
        return time.monotonic() - began

    return seconds("import torch") - seconds("pass")


def main() -> None:
    asked = arguments()
    run = "from flatout.cli.main import main; main()"
    command = subprocess.Popen(
        [sys.executable, "-c", run, "run", "--devices", "2", str(JOB)],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "FLATOUT_CACHE": os.path.abspath("cache")},
    )
    try:
        until_step(0, 0, KILL_AT, command)
        process = process_of(asked.rank, command)
        killed = time.monotonic()
        process.kill()
        went_on = until_step(0, 1, 1, command)
    finally:
        command.send_signal(signal.SIGTERM)
        try:
            command.wait(60)
        except subprocess.TimeoutExpired:
            command.kill()
    imported = seconds_of_import()
    # In the form that all peers report in: one epoch of one step.
    result = {"epoch_seconds": [went_on - killed], "steps": 1, "note": f"{imported:.3f}"}
    asked.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
