"""`fit` with nothing set, beside the best that one writes by hand, over families of models.

    python bench/breadth.py [--seconds 30] [--restarts 1] [--only resnet gpt] [--compile]
                            [--losses] [--at-once 1] [--json [FILE]]

The planned run is as many steps as the plain loop makes in `--seconds`. Each arm by hand is timed
in a fresh process. Then the plain loop, the best by hand and the default (`Trainer.fit` with an
empty cache) make the whole run in three processes that take turns by epochs, so that all meet the
same fast and slow moments of the machine. `default_vs_...` compares all seconds of these runs: of
the default with what it measures. `steady_vs_...` compares the medians of the last third of the
steps.

`--losses` compares the loss after 200 steps with that of the plain loop from three seeds: whether
it lies where 95% of further seeds would (t with two degrees of freedom). `--at-once` measures so
many families at a time, each on two CPUs of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import restarts
from restarts import PROGRESS, PeerFailed, each, tell
from results import Key, Results, add_arguments, finish, over_rows

PEERS = Path(__file__).parent / "peers"
IMAGES = ("convnet", "resnet", "depthwise", "unet", "vit", "autoencoder", "mixer")
FAMILIES = (*IMAGES, "mlp", "gpt", "lstm", "textcnn", "tables", "graph")
BATCHES = 24  # of an epoch of the job
LOSS_STEPS = 9 * BATCHES
T_OF_TWO = 4.303  # the 97.5th percentile of Student's t


def run(family: str, arm: str, **options: Any) -> dict[str, Any]:
    """What a fresh process with an empty cache found."""
    with tempfile.TemporaryDirectory() as folder:
        return result_of(start(family, arm, folder, **options))


def in_turn(family: str, arms: Sequence[str], **options: Any) -> list[dict[str, Any]]:
    """What such processes found that took turns by epochs."""
    with tempfile.TemporaryDirectory() as folder:
        jobs, ends = [], []
        for at, arm in enumerate(arms):
            (theirs, go), (said, told) = os.pipe(), os.pipe()
            place = Path(folder, str(at))
            place.mkdir()
            jobs.append(start(family, arm, str(place), turns=(theirs, told), **options))
            os.close(theirs)
            os.close(told)
            ends.append((go, said))
            os.read(said, 1)  # it waits for its first turn, or has ended
        going = list(ends)
        while going:
            for go, said in list(going):
                with suppress(BrokenPipeError):
                    os.write(go, b".")
                if not os.read(said, 1):
                    going.remove((go, said))
        for end in chain(*ends):
            os.close(end)
        return [result_of(job) for job in jobs]


def start(
    family: str, arm: str, folder: str, turns: tuple[int, ...] = (), **options: Any
) -> subprocess.Popen[str]:
    arguments = [f"--{name}={value}" for name, value in options.items()]
    if turns:
        arguments += ["--turns", *map(str, turns)]
    job = [sys.executable, str(PEERS / "breadth_job.py"), "--out", f"{folder}/out.json"]
    command = [*job, "--family", family, "--arm", arm, *arguments]
    return restarts.start(command, folder, {"FLATOUT_CACHE": f"{folder}/cache"}, turns)


def result_of(job: subprocess.Popen[str]) -> dict[str, Any]:
    _, errors = job.communicate()
    restarts.end(job)
    if job.returncode:
        last = errors.strip().splitlines()[-1:]
        raise PeerFailed(f"{shlex.join(job.args)}: {last or job.returncode}")
    found: dict[str, Any] = json.loads(Path(job.args[3]).read_text())
    PROGRESS.keep(job=job.args[5:], found=found)
    return found


def arms(family: str, *, compiles: bool) -> list[str]:
    found = ["fp32", "fused", "bf16"]
    if family in IMAGES:
        found += ["channels_last", "bf16+channels_last", "bf16+channels_last+fused"]
    else:
        found.append("bf16+fused")
    return [*found, "again", *(["compile"] if compiles else [])]


def measure(family: str, a: argparse.Namespace) -> dict[str, Any]:
    """All arms of a family, and what the default came to."""
    found: dict[str, list[dict[str, Any]]] = {}
    names = arms(family, compiles=a.compile)
    for restart in range(a.restarts):
        turn = restart % len(names)
        for arm in [*names[turn:], *names[:turn]]:
            found.setdefault(arm, []).append(run(family, "fp32" if arm == "again" else arm))
    step_s = {arm: median(one["step_s"] for one in runs) for arm, runs in found.items()}
    setup_s = {arm: median(one["setup_s"] for one in runs) for arm, runs in found.items()}
    plain = min(step_s["fp32"], step_s.pop("again"))
    steps = BATCHES * max(2, round(a.seconds / plain / BATCHES))
    hand = {arm: steps * step + setup_s[arm] for arm, step in step_s.items()}
    best = min(hand, key=lambda arm: hand[arm])
    turns = [in_turn(family, ["fp32", best, "default"], steps=steps) for _ in range(a.restarts)]
    fits = [default for _, _, default in turns]
    for one in fits:
        (one["tuning"] or {}).pop("spans", None)  # a line for each of hundreds

    def times(key: str, arm: int) -> float:
        """How many times as fast as this arm the default is."""
        return median(run[arm][key] / run[2][key] for run in turns)

    row = {
        "family": family,
        "steps": steps,
        "plain_s": median(plain["last_s"] for plain, _, _ in turns),
        "again": median(o["step_s"] for o in found["again"]) / step_s["fp32"],
        "hand_s": step_s,
        "best": best,
        "best_s": median(best["last_s"] for _, best, _ in turns),
        "fit_s": median(one["fit_s"] for one in fits),
        "step_s": median(one["last_s"] for one in fits),
        "vs_plain": times("fit_s", 0),
        "vs_hand": times("fit_s", 1),
        "steady_vs_plain": times("last_s", 0),
        "steady_vs_hand": times("last_s", 1),
        "before_s": max(one["before_s"] for one in fits),
        "lost_share": max(one["lost_s"] / one["fit_s"] for one in fits),
        "all_lost_share": max((one["before_s"] + one["lost_s"]) / one["fit_s"] for one in fits),
        "fits": fits,
    }
    if a.losses:
        seeds = [run(family, "fp32", steps=LOSS_STEPS, seed=seed)["loss"] for seed in range(3)]
        loss = run(family, "default", steps=LOSS_STEPS)["loss"]
        row["losses"] = {"plain": seeds, "default": loss}
        reach = T_OF_TWO * stdev(seeds) * math.sqrt(1 + 1 / len(seeds))
        row["within"] = abs(loss - mean(seeds)) <= reach
    tell("  ".join(line(row)))
    return row


def measure_all(families: Sequence[str], a: argparse.Namespace) -> list[dict[str, Any]]:
    """So many families at a time as asked for, each on CPUs of its own."""
    if a.at_once == 1:
        return each(families, lambda family: measure(family, a))
    cpus = sorted(os.sched_getaffinity(0))
    pairs = iter([cpus[2 * at : 2 * at + 2] for at in range(a.at_once)])
    if len(cpus) < 2 * a.at_once:
        raise SystemExit(f"--at-once {a.at_once} needs {2 * a.at_once} CPUs: this has {len(cpus)}")
    # Of the thread alone, and of the processes that it starts.
    pool = ThreadPoolExecutor(a.at_once, initializer=lambda: os.sched_setaffinity(0, next(pairs)))
    running = {family: pool.submit(measure, family, a) for family in families}
    rows = each(families, lambda family: running[family].result())
    pool.shutdown(wait=False, cancel_futures=True)
    return rows


def most_tuning(seconds: float) -> float:
    """The share of a run that tuning may take: 0.05 up to 10 s, 0.02 from 60 s, linear between."""
    return 0.05 - 0.03 * (min(max(seconds, 10.0), 60.0) - 10.0) / 50.0


def keys(rows: list[dict[str, Any]], a: argparse.Namespace) -> list[Key]:
    steady = "the last third of the steps"

    def of(what: Callable[[Iterable[float]], float], name: str) -> float | str:
        return over_rows(what, rows, lambda row: row[name])

    found = [
        Key("default_vs_best_by_hand", of(median, "vs_hand"), at_least=1.0),
        Key("default_vs_best_worst", of(min, "vs_hand"), at_least=0.95),
        Key("default_vs_plain", of(median, "vs_plain"), at_least=1.5),
        Key("default_vs_plain_worst", of(min, "vs_plain"), at_least=1.0),
        Key("steady_vs_best_by_hand", of(median, "steady_vs_hand"), note=steady),
        Key("steady_vs_best_worst", of(min, "steady_vs_hand"), note=steady),
        Key("steady_vs_plain", of(median, "steady_vs_plain"), note=steady),
        tuning_key(rows),
        Key(
            "all_lost_share",
            of(max, "all_lost_share"),
            note="of a run, with the time before the first step",
        ),
        Key("seconds_before_first_step", of(max, "before_s"), at_most=6.0),
        Key(
            "share_before_first_step",
            over_rows(max, rows, lambda row: row["before_s"] / (row["steps"] * row["plain_s"])),
            at_most=0.1,
        ),
    ]
    if a.losses:
        found.append(
            Key(
                "loss_within_spread",
                over_rows(mean, rows, lambda row: float(row["within"])),
                at_least=1.0,
            )
        )
    return found


def tuning_key(rows: list[dict[str, Any]]) -> Key:
    if not rows:
        return Key("tuning_share", PROGRESS.reason)
    tuned = max(rows, key=lambda r: r["lost_share"] / most_tuning(r["fit_s"]))
    return Key(
        "tuning_share",
        tuned["lost_share"],
        at_most=most_tuning(tuned["fit_s"]),
        note=f"slower steps of {tuned['family']}, of {tuned['fit_s']:.0f} s: nearest to what "
        "a run of its length may take",
    )


def line(row: dict[str, Any]) -> list[str]:
    def rate(seconds: float) -> str:
        return f"{row['plain_s'] / seconds:.2f}"

    return [
        row["family"],
        f"{1e3 * row['plain_s']:.1f}",
        f"{row['again']:.2f}",
        rate(row["best_s"]),
        row["best"],
        f"{row['vs_plain']:.2f}",
        rate(row["step_s"]),
        f"{row['steady_vs_hand']:.2f}",
        f"{row['vs_hand']:.2f}",
        f"{row['before_s']:.2f}",
        f"{row['all_lost_share']:.3f}",
        row["fits"][0]["words"],
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, restarts=1)
    parser.add_argument("--seconds", type=float, default=30.0, help="of the plain run")
    parser.add_argument("--only", nargs="*", choices=FAMILIES)
    parser.add_argument("--compile", action="store_true", help="torch.compile by hand, too")
    parser.add_argument("--losses", action="store_true", help="compare losses")
    parser.add_argument("--at-once", type=int, default=1, help="families at a time")
    a = parser.parse_args()
    rows = measure_all(a.only or FAMILIES, a)
    results = Results(
        title=f"Planned for {a.seconds:g} s of plain steps; restarts of each: {a.restarts}",
        headers=[
            "family", "plain ms", "A/A", "by hand", "which", "default", "steady",
            "steady vs hand", "vs hand", "before s", "all lost", "chosen",
        ],
        lines=[line(row) for row in rows],
        remarks=["by hand, default (whole runs), steady (last third): times as fast as plain"],
        keys=keys(rows, a),
        data={"rows": rows},
    )  # fmt: skip
    return finish(results, a)


if __name__ == "__main__":
    sys.exit(main())
