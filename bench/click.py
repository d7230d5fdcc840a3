"""DeepFM on 39 fields of ids: what a step costs by the rows of its tables, against other ways.

    python bench/click.py [--restarts 2] [--json [FILE]]
    python bench/click.py --only vs_plain hybrid_vs_replicated flatout-fp32

32 factors for each id, layers 128-64-32, skewed ids, Adam, samples in memory, all usable CPUs. The
tables have 1 M rows and batches 1,024 samples where nothing else is said; there are 10 M rows too,
and 100 M with 8 factors. Peers: torch's dense Adam; torch's sparse gradients with SparseAdam or
SGD, and Adam for the rest; Keras on TensorFlow and on torch. On two ranks: tables on both, sharded
over them, and torch's DDP with a dense Adam; of this host, and of two with a link of 1 Gbit/s,
which are network namespaces of this machine and take root. Peers that walk through whole tables
make half as many steps, so their AUC is that of less training.

`--only` measures these keys alone, and peers of which no key is made, such as other sizes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from flatout.measure import usable_cpus
from restarts import (
    Peer,
    PeerFailed,
    Row,
    ratio,
    run_in_turn,
    run_once,
    tell,
    versions,
)
from results import Key, Results, add_arguments, finish, lines_of, notes_of, positive, rows_as_data
from two_nodes import two_nodes, why_not

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
RANKS = (REPLICATED, SHARDED, DDP)
HOSTS = "hosts-"  # in the place of "ranks-"
MBIT = 1000
# A step that sends the gradients of whole tables over the link takes more than two seconds.
FEW_STEPS, FEW_EPOCHS = 6, 2
TESTED = ("--held-out", "20000")
EQUAL = {
    "dense_equal": (None, 1e-5),
    "largest_difference": (None, None),
    "bitwise_on_threads": (1, None),
    "auc_difference": (None, 0.001),
}


class Ratio(NamedTuple):
    """A key that is the time of one peer over that of another."""

    key: str
    slower: str
    faster: str = FLATOUT
    at_least: float | None = None
    at_most: float | None = None
    note: str = ""


HERE_NOTE = "tables sharded over two ranks of this host, one thread each"
HOSTS_NOTE = f"two hosts, {MBIT} Mbit/s"
RATIOS = (
    Ratio("vs_plain", PLAIN, at_least=12),
    Ratio("vs_plain_fields_apart", "adam-fields-apart", "flatout-fields-apart"),
    Ratio("vs_keras_tf", "keras-tensorflow", at_least=4),
    Ratio("vs_keras_torch", "keras-torch"),
    Ratio("vs_sparse_by_hand", "sparse-adam", at_least=1.3),
    Ratio("vs_sparse_sgd", "sparse-sgd", note="SGD learns something else"),
    Ratio("ten_million_vs_one_million", "flatout-10m-1024", at_most=1.3, note="of a step"),
    Ratio("hundred_million_vs_one_million", LARGE, SMALL, at_most=1.6, note="8 factors"),
    Ratio("hybrid_vs_replicated", REPLICATED, SHARDED, at_least=1.2, note=HERE_NOTE),
    Ratio("hybrid_vs_dense_ddp_here", DDP, SHARDED, note="two ranks of this host"),
    Ratio("flatout_vs_itself", AGAIN, note="A/A: what noise makes of 1"),
)
HOST_RATIOS = (
    Ratio("hybrid_vs_dense_ddp", "hosts-ddp", "hosts-sharded", at_least=10, note=HOSTS_NOTE),
    Ratio("hybrid_vs_replicated_apart", "hosts-replicated", "hosts-sharded", note=HOSTS_NOTE),
)


def peers(threads: int, steps: int, epochs: int, warm_up: int, most_rows: int) -> list[Peer]:
    """All peers; `warm_up` is how many epochs Flatout gets to find out what is fast."""
    shared = ("--threads", str(threads), "--steps", str(steps), "--epochs", str(epochs))
    # Of peers that walk through whole tables, whose steps are long.
    long = ("--threads", str(threads), "--steps", str(-(-steps // 2)), "--epochs", str(epochs))
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
        given = (*(long if optimizer == PLAIN else shared), *TESTED, "--optimizer", optimizer)
        found.append(Peer(optimizer, "click_torch.py", given, ("torch",)))
    given = (*long, "--optimizer", PLAIN, "--fields-apart")
    found.append(Peer("adam-fields-apart", "click_torch.py", given, ("torch",)))
    for backend in ("tensorflow", "torch"):
        given = (*(long if backend == "torch" else shared), *TESTED, "--backend", backend)
        found.append(Peer(f"keras-{backend}", "click_keras.py", given, (backend, "keras")))
    for name in RANKS:
        given = (*(long if name == DDP else own), "--threads", "1")
        given = (*given, *tables_of(name))
        found.append(Peer(name, "click_ranks.py", given, needs))
    return found


def tables_of(name: str) -> tuple[str, ...]:
    """What a peer on ranks is told of its tables."""
    return ("--tables", name.removeprefix("ranks-"))


def on_two_hosts(warm_up: int, nodes: Sequence[str]) -> list[Peer]:
    """The ways on two ranks again, each rank on its own node."""
    found = []
    for name in RANKS:
        epochs = 1 if name == DDP else warm_up
        passes = ("--steps", FEW_STEPS, "--epochs", FEW_EPOCHS, "--warm-up", epochs)
        given = (*passes, "--threads", 1, *tables_of(name))
        started = ("--script", "click_ranks.py", "--ranks", 1, "--nodes", *nodes)
        words = tuple(map(str, (*started, *given)))
        known = name.replace("ranks-", HOSTS)
        found.append(Peer(known, "nodes_start.py", words, ("torch", "flatout")))
    return found


def speed_keys(rows: dict[str, Row], wanted: Collection[str] = ()) -> list[Key]:
    """Those of the wanted names; without names, all."""
    found = []
    for key, slower, faster, at_least, at_most, note in (*RATIOS, *HOST_RATIOS):
        if wanted and key not in wanted:
            continue
        known = slower in rows and faster in rows
        value = ratio(rows, slower, faster) if known else "left out by --most-rows"
        found.append(Key(key, value, at_most, at_least, note))
    return found


def equality(threads: int, steps: int) -> list[Key]:
    """Weights after `steps` steps against torch's dense optimizers, and on other threads."""
    given = ("--threads", str(threads), "--steps", str(steps), "--rows", str(FEW_ROWS))
    peer = Peer("equal", "click_equal.py", (*given, "--factors", "8", "--batch", "256", *TESTED))
    try:
        found = run_once(peer)
    except PeerFailed as error:
        why = f"failed: {error}"
        return [Key(name, why, most, least) for name, (least, most) in EQUAL.items()]

    def words(found_in: str, fused: str) -> str:
        each = ", ".join(f"{name} {value:.1e}" for name, value in found[found_in].items())
        return f"{each}; torch's own fused Adam {found[fused]:.1e}"

    dense, ours = found["auc"]
    aucs = f"DeepFM in the same order: torch {dense:.4f}, Flatout {ours:.4f}"
    values = {
        "dense_equal": max(found["differences"].values()),
        "largest_difference": max(found["of_one"].values()),
        "bitwise_on_threads": float(found["bitwise"]),
        "auc_difference": abs(dense - ours),
    }
    notes = {
        "dense_equal": f"norm of the difference: {words('differences', 'fused')}",
        "largest_difference": f"of a single weight: {words('of_one', 'fused_of_one')}",
        "bitwise_on_threads": "1: equal bits",
        "auc_difference": aucs,
    }
    return [
        Key(name, values[name], most, least, notes[name]) for name, (least, most) in EQUAL.items()
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
    add_arguments(parser, restarts=2)
    parser.add_argument("--steps", type=positive, default=40, help="in an epoch")
    parser.add_argument("--epochs", type=positive, default=3, help="timed epochs a process")
    parser.add_argument("--warm-up", type=positive, default=8, help="Flatout's epochs before them")
    parser.add_argument("--equal-steps", type=positive, default=500)
    parser.add_argument("--most-rows", type=positive, default=LARGE_ROWS, help="leave out more")
    names = [peer.name for peer in peers(1, 1, 1, 1, LARGE_ROWS)]
    keys = [WAIT, *EQUAL, *(one.key for one in (*RATIOS, *HOST_RATIOS))]
    parser.add_argument("--only", nargs="+", default=(), choices=[*keys, *names], metavar="KEY")
    return parser.parse_args()


def in_ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms a step"


def asked_peers(arguments: argparse.Namespace, ratios: Iterable[Ratio]) -> set[str]:
    """Of which peers keys are made that are wanted, and those that are asked for by name."""
    wanted = arguments.only
    chosen = [one for one in ratios if not wanted or one.key in wanted]
    return {*wanted, *(name for one in chosen for name in (one.slower, one.faster))}


def run_here(arguments: argparse.Namespace, threads: int) -> dict[str, Row]:
    asked = asked_peers(arguments, RATIOS)
    passes = (arguments.steps, arguments.epochs, arguments.warm_up)
    chosen = [p for p in peers(threads, *passes, arguments.most_rows) if p.name in asked]
    return run_in_turn(chosen, restarts=arguments.restarts, tell=tell, figure=in_ms)


def run_on_two_hosts(arguments: argparse.Namespace) -> dict[str, Row]:
    """The ways on two hosts, of which keys are wanted; why not, where this machine has none."""
    asked = asked_peers(arguments, HOST_RATIOS)
    chosen = [peer for peer in on_two_hosts(1, ()) if peer.name in asked]
    if not chosen or (reason := why_not()):
        return {peer.name: Row(peer, reason) for peer in chosen}
    with two_nodes(MBIT) as nodes:
        chosen = [p for p in on_two_hosts(arguments.warm_up, nodes) if p.name in asked]
        return run_in_turn(chosen, restarts=arguments.restarts, tell=tell, figure=in_ms)


def main() -> int:
    arguments = read_arguments()
    threads, wanted = usable_cpus(), set(arguments.only)
    passes = (arguments.steps, arguments.epochs, arguments.warm_up)
    keys = []
    if not wanted or WAIT in wanted:
        rows_there = ROWS if arguments.most_rows >= ROWS else FEW_ROWS
        keys.append(input_wait(threads, *passes, rows_there))
    if not wanted or wanted & EQUAL.keys():
        found = equality(threads, arguments.equal_steps)
        keys += [key for key in found if not wanted or key.name in wanted]
    for key in keys:
        tell(key.words)
    rows = run_here(arguments, threads) | run_on_two_hosts(arguments)
    reference = FLATOUT if FLATOUT in rows else next(iter(rows), FLATOUT)
    results = Results(
        title=f"DeepFM, {BATCH} samples of 39 fields a step, 1 M rows where nothing else is said, "
        f"threads: {threads}; restarts of each: {arguments.restarts}",
        headers=["", "steps/s", "slowest .. fastest", f"time / {reference}'s", "AUC", ""],
        lines=lines_of(rows, reference, lambda seconds: f"{1 / seconds:,.1f}"),
        remarks=notes_of(rows),
        keys=[*speed_keys(rows, wanted), *keys],
        data={
            "rows": rows_as_data(rows, reference),
            "versions": versions([row.peer for row in rows.values()]),
        },
    )
    return finish(results, arguments)


if __name__ == "__main__":
    sys.exit(main())
