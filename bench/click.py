"""DeepFM on 39 fields of ids: what a step costs by the rows of its tables, against other ways.

    python bench/click.py [--restarts 3] [--only flatout adam] [--json [FILE]]
    python bench/click.py --input-wait
    python bench/click.py --ranks
    python bench/click.py --two-hosts

32 factors for each id, layers 128-64-32, skewed ids, Adam, samples in memory, all usable CPUs. The
sizes are 117,581, 1 M and 10 M rows with batches of 1,024 and 4,096, and 100 M rows with 8 factors.
Peers run with 1 M rows and batches of 1,024: torch's dense Adam; torch's sparse gradients with
SparseAdam or SGD, and Adam for the rest; Keras on TensorFlow and on torch. On two ranks: tables on
both, sharded over them, and torch's DDP with a dense Adam. `--ranks` measures only these.
`--input-wait` measures only which share of a step waits for input, where samples come from LibSVM
text, on two cores. `--two-hosts` measures only two ranks on hosts of their own with a link of 1
Gbit/s: network namespaces of this machine, which takes root.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
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
from two_nodes import two_nodes, why_not

# In its own folder this file would pass for the package click, where someone imports that.
HERE = str(Path(__file__).parent)
sys.path[:] = [folder for folder in sys.path if folder != HERE]

Keys = Callable[[dict[str, Row]], list[Key]]

WAIT = "file_to_step_input_wait"
FLATOUT, AGAIN, PLAIN = "flatout", "flatout-again", "adam"
ROWS, FEW_ROWS, BATCH = 1_000_000, 20_000, 1024
SIZES = {"117k": 117_581, "1m": ROWS, "10m": 10_000_000}
LARGE, LARGE_ROWS, FEW_FACTORS = "flatout-100m-8", 100_000_000, 8
SMALL = "flatout-1m-8"
REPLICATED, SHARDED, DDP = "ranks-replicated", "ranks-sharded", "ranks-ddp"
RANKS = (REPLICATED, SHARDED, DDP)
MBIT = 1000
# A step that sends the gradients of whole tables takes more than a second.
FEW_STEPS, FEW_EPOCHS = 10, 2
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
    for name in RANKS:
        given = (*own, "--threads", "1", "--tables", name.removeprefix("ranks-"))
        found.append(Peer(name, "click_ranks.py", given, needs))
    return found


def on_two_hosts(warm_up: int, nodes: Sequence[str]) -> list[Peer]:
    """The ways on two ranks again, each rank on a node of its own."""
    found = []
    for name in RANKS:
        epochs = 1 if name == DDP else warm_up
        passes = ("--steps", FEW_STEPS, "--epochs", FEW_EPOCHS, "--warm-up", epochs)
        given = (*passes, "--threads", 1, "--tables", name.removeprefix("ranks-"))
        started = ("--script", "click_ranks.py", "--ranks", 1, "--nodes", *nodes)
        words = tuple(map(str, (*started, *given)))
        found.append(Peer(name, "nodes_start.py", words, ("torch", "flatout")))
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
        *rank_keys(times(REPLICATED, SHARDED), times(DDP, SHARDED)),
        Key("flatout_vs_itself", times(AGAIN), note="A/A: what noise makes of 1"),
    ]


def rank_keys(replicated: Any, dense: Any) -> list[Key]:
    """Of two ranks of this host, against the time of sharded tables."""
    note = "tables sharded over two ranks of this host, one thread each"
    return [
        Key("hybrid_vs_replicated", replicated, at_least=1.2, note=note),
        Key("hybrid_vs_dense_ddp_here", dense, note="two ranks of this host"),
    ]


def host_keys(rows: dict[str, Row]) -> list[Key]:
    """Of two hosts."""
    note = f"two hosts, {MBIT} Mbit/s"
    dense, replicated = ratio(rows, DDP, SHARDED), ratio(rows, REPLICATED, SHARDED)
    return [
        Key("hybrid_vs_dense_ddp", dense, at_least=10, note=note),
        Key("hybrid_vs_replicated_apart", replicated, note=note),
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
    parser.add_argument("--ranks", action="store_true", help="measure two ranks of this host alone")
    parser.add_argument("--two-hosts", action="store_true", help="measure two hosts alone")
    names = [peer.name for peer in peers(1, 1, 1, 1, LARGE_ROWS)]
    parser.add_argument("--only", nargs="+", default=(), choices=names, metavar="PEER")
    return parser.parse_args()


def in_ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms a step"


def measured(
    chosen: Sequence[Peer], arguments: argparse.Namespace, where: str, keys: Keys, reference: str
) -> Results:
    """Run these peers in turn, and compare them."""
    rows = run_in_turn(
        chosen, restarts=arguments.restarts, only=arguments.only, tell=tell, figure=in_ms
    )
    return Results(
        title=f"DeepFM, {BATCH} samples of 39 fields a step, 1 M rows where nothing else is said, "
        f"{where}; restarts of each: {arguments.restarts}",
        headers=["", "steps/s", "slowest .. fastest", f"time / {reference}'s", "AUC", ""],
        lines=lines_of(rows, reference, lambda seconds: f"{1 / seconds:,.1f}"),
        remarks=notes_of(rows),
        keys=keys(rows),
        data={"rows": rows_as_data(rows, reference), "versions": versions(chosen)},
    )


def on_ranks(arguments: argparse.Namespace) -> Results:
    passes = (arguments.steps, arguments.epochs, arguments.warm_up)
    chosen = [peer for peer in peers(1, *passes, ROWS) if peer.name in RANKS]

    def keys(rows: dict[str, Row]) -> list[Key]:
        return rank_keys(ratio(rows, REPLICATED, SHARDED), ratio(rows, DDP, SHARDED))

    return measured(chosen, arguments, "two ranks of this host", keys, SHARDED)


def two_hosts(arguments: argparse.Namespace) -> Results:
    if reason := why_not():
        raise SystemExit(reason)
    with two_nodes(MBIT) as nodes:
        chosen = on_two_hosts(arguments.warm_up, nodes)
        return measured(chosen, arguments, f"two hosts, {MBIT} Mbit/s", host_keys, SHARDED)


def main() -> int:
    arguments = read_arguments()
    end_peers_on_sigterm()
    if arguments.two_hosts or arguments.ranks:
        return finish((two_hosts if arguments.two_hosts else on_ranks)(arguments), arguments)
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

    def keys(rows: dict[str, Row]) -> list[Key]:
        return [*speed_keys(rows), *equal, wait]

    return finish(measured(chosen, arguments, f"threads: {threads}", keys, FLATOUT), arguments)


if __name__ == "__main__":
    sys.exit(main())
