"""DeepFM on 39 fields of ids: what a step costs by the rows of its tables, against other ways.

    python bench/click.py [--restarts 3] [--only flatout adam] [--json [FILE]]
    python bench/click.py --input-wait

32 factors for each id, layers 128-64-32, skewed ids, Adam, samples in memory, all usable CPUs. The
sizes are 117,581, 1 M and 10 M rows with batches of 1,024 and 4,096, and 100 M rows with 8 factors.
Peers run with 1 M rows and batches of 1,024: torch's dense Adam; torch's sparse gradients with
SparseAdam or SGD, and Adam for the rest; Keras on TensorFlow and on torch. On two ranks: tables on
both, sharded over them, and torch's DDP with a dense Adam. `--input-wait` measures only which share
of a step waits for input, where samples come from LibSVM text, on two cores.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from convnet import tell
from flatout.measure import usable_cpus
from restarts import (
    Peer,
    PeerFailed,
    Row,
    end_peers_on_sigterm,
    ratio,
    run_in_turn,
    run_once,
    versions,
)
from results import Key, Results, add_arguments, finish, lines_of, notes_of, positive, rows_as_data

# In its own folder this file would pass for the package click, where someone imports that.
HERE = str(Path(__file__).parent)
sys.path[:] = [folder for folder in sys.path if folder != HERE]

WAIT = "file_to_step_input_wait"
FLATOUT, AGAIN, PLAIN = "flatout", "flatout-again", "adam"
ROWS, FEW_ROWS, BATCH = 1_000_000, 20_000, 1024
SIZES = {"117k": 117_581, "1m": ROWS, "10m": 10_000_000}
LARGE, LARGE_ROWS, FEW_FACTORS = "flatout-100m-8", 100_000_000, 8
SMALL = "flatout-1m-8"
REPLICATED, SHARDED, DDP = "ranks-replicated", "ranks-sharded", "ranks-ddp"
TESTED = ("--held-out", "20000")


def peers(threads: int, steps: int, epochs: int, warm_up: int, most_rows: int) -> list[Peer]:
    """All peers; `warm_up` is how many epochs Flatout gets to find out what is fast."""
    shared = ("--threads", str(threads), "--steps", str(steps), "--epochs", str(epochs))
    own = (*shared, "--warm-up", str(warm_up))
    needs = ("torch", "flatout")

    def flatout(name: str, *given: str) -> Peer:
        return Peer(name, "click_flatout.py", (*own, *given), needs)

    found = [flatout(FLATOUT, *TESTED), flatout(AGAIN, *TESTED)]
    found.append(flatout("flatout-fields-apart", "--fields-apart"))
    found.append(flatout("flatout-fp32", *TESTED, "--set", "compute.precision=fp32"))
    for name, rows in SIZES.items():
        for batch in (1024, 4096):
            if (rows, batch) != (ROWS, BATCH) and rows <= most_rows:
                given = ("--rows", str(rows), "--batch", str(batch))
                found.append(flatout(f"flatout-{name}-{batch}", *given))
    for name, rows in ((SMALL, ROWS), (LARGE, LARGE_ROWS)):
        if rows <= most_rows:
            given = ("--rows", str(rows), "--factors", str(FEW_FACTORS))
            found.append(flatout(name, *given))
    for optimizer in (PLAIN, "sparse-adam", "sparse-sgd"):
        given = (*shared, *TESTED, "--optimizer", optimizer)
        found.append(Peer(optimizer, "click_torch.py", given, ("torch",)))
    given = (*shared, "--optimizer", PLAIN, "--fields-apart")
    found.append(Peer("adam-fields-apart", "click_torch.py", given, ("torch",)))
    for backend in ("tensorflow", "torch"):
        given = (*shared, *TESTED, "--backend", backend)
        found.append(Peer(f"keras-{backend}", "click_keras.py", given, (backend, "keras")))
    for name in (REPLICATED, SHARDED, DDP):
        given = (*own, "--threads", "1", "--tables", name.removeprefix("ranks-"))
        found.append(Peer(name, "click_ranks.py", given, needs))
    return found


def speed_keys(rows: dict[str, Row]) -> list[Key]:
    def times(slower: str, faster: str = FLATOUT) -> Any:
        known = slower in rows and faster in rows
        return ratio(rows, slower, faster) if known else "left out by --most-rows"

    return [
        Key("vs_plain", times(PLAIN), at_least=12),
        Key("vs_plain_fields_apart", times("adam-fields-apart", "flatout-fields-apart")),
        Key("vs_keras_tf", times("keras-tensorflow"), at_least=4),
        Key("vs_keras_torch", times("keras-torch")),
        Key("vs_sparse_by_hand", times("sparse-adam"), at_least=1.3),
        Key("vs_sparse_sgd", times("sparse-sgd"), note="SGD learns something else"),
        Key("ten_million_vs_one_million", times("flatout-10m-1024"), at_most=1.3, note="of a step"),
        Key("hundred_million_vs_one_million", times(LARGE, SMALL), at_most=1.6, note="8 factors"),
        Key(
            "hybrid_vs_replicated",
            times(REPLICATED, SHARDED),
            at_least=1.2,
            note="tables sharded over two ranks of this host, one thread each",
        ),
        Key("hybrid_vs_dense_ddp", times(DDP, SHARDED), note="two ranks of this host"),
        Key("flatout_vs_itself", times(AGAIN), note="A/A: what noise makes of 1"),
    ]


def equality(threads: int, steps: int) -> list[Key]:
    """Weights after `steps` steps against torch's dense optimizers, and on other threads."""
    given = ("--threads", str(threads), "--steps", str(steps), "--rows", str(FEW_ROWS))
    peer = Peer("equal", "click_equal.py", (*given, "--factors", "8", "--batch", "256", *TESTED))
    try:
        found = run_once(peer)
    except PeerFailed as error:
        why = f"failed: {error}"
        return [
            Key("dense_equal", why, at_most=1e-5),
            Key("bitwise_on_threads", why, at_least=1),
            Key("auc_difference", why, at_most=0.001),
        ]

    def words(found_in: str, fused: str) -> str:
        each = ", ".join(f"{name} {value:.1e}" for name, value in found[found_in].items())
        return f"{each}; torch's own fused Adam {found[fused]:.1e}"

    dense, ours = found["auc"]
    aucs = f"DeepFM in the same order: torch {dense:.4f}, Flatout {ours:.4f}"
    return [
        Key(
            "dense_equal",
            max(found["differences"].values()),
            at_most=1e-5,
            note=f"norm of the difference: {words('differences', 'fused')}",
        ),
        Key(
            "largest_difference",
            max(found["of_one"].values()),
            note=f"of a single weight: {words('of_one', 'fused_of_one')}",
        ),
        Key("bitwise_on_threads", float(found["bitwise"]), at_least=1, note="1: equal bits"),
        Key("auc_difference", abs(dense - ours), at_most=0.001, note=aucs),
    ]


def input_wait(threads: int, steps: int, epochs: int, warm_up: int, rows: int) -> Key:
    """Which share of a step waits for input from LibSVM text, the larger of two batch sizes."""
    passes = ("--steps", str(steps), "--epochs", str(epochs), "--warm-up", str(warm_up))
    given = ("--threads", str(threads), *passes, "--rows", str(rows))
    shares, words = [], []
    for batch in (BATCH, 4 * BATCH):
        try:
            found = run_once(Peer("file", "click_file.py", (*given, "--batch", str(batch))))
        except PeerFailed as error:
            return Key(WAIT, f"failed: {error}", at_most=0.05)
        shares.append(found["share"])
        words.append(f"batches of {batch:,}: {found['share']:.1%} of {found['step_ms']:.1f} ms")
    return Key(WAIT, max(shares), at_most=0.05, note=f"two cores, {', '.join(words)}")


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, restarts=3)
    parser.add_argument("--steps", type=positive, default=40, help="in an epoch")
    parser.add_argument("--epochs", type=positive, default=3, help="timed epochs a process")
    parser.add_argument("--warm-up", type=positive, default=8, help="Flatout's epochs before them")
    parser.add_argument("--equal-steps", type=positive, default=500)
    parser.add_argument("--most-rows", type=positive, default=LARGE_ROWS, help="leave out more")
    parser.add_argument("--input-wait", action="store_true", help=f"measure {WAIT} alone")
    names = [peer.name for peer in peers(1, 1, 1, 1, LARGE_ROWS)]
    parser.add_argument("--only", nargs="+", default=(), choices=names, metavar="PEER")
    return parser.parse_args()


def main() -> int:
    arguments = read_arguments()
    end_peers_on_sigterm()
    threads = usable_cpus()
    passes = (arguments.steps, arguments.epochs, arguments.warm_up)
    wait = input_wait(threads, *passes, ROWS if arguments.most_rows >= ROWS else FEW_ROWS)
    tell(wait.words)
    if arguments.input_wait:
        title = f"DeepFM from LibSVM text, threads: {threads}"
        return finish(Results(title, ["", ""], [], [], [wait], {}), arguments)
    equal = equality(threads, arguments.equal_steps)
    for key in equal:
        tell(key.words)
    chosen = peers(threads, *passes, arguments.most_rows)
    rows = run_in_turn(chosen, restarts=arguments.restarts, only=arguments.only, tell=tell)
    results = Results(
        title=f"DeepFM, {BATCH} samples of 39 fields a step, 1 M rows where nothing else is said, "
        f"threads: {threads}; restarts of each: {arguments.restarts}",
        headers=["", "steps/s", "slowest .. fastest", "time / flatout's", "AUC", ""],
        lines=lines_of(rows, FLATOUT, lambda seconds: f"{1 / seconds:,.1f}"),
        remarks=notes_of(rows),
        keys=[*speed_keys(rows), *equal, wait],
        data={"rows": rows_as_data(rows, FLATOUT), "versions": versions(chosen)},
    )
    return finish(results, arguments)


if __name__ == "__main__":
    sys.exit(main())
