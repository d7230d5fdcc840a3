"""Several ranks, side by side with what one writes by hand.

    python bench/parallel.py --data DIR [--restarts 5] [--json [FILE]]

On one node: the step of two ranks beside the best DistributedDataParallel loop that one writes by
hand (MLP 784-1024-1024-10, batch 128, one thread each, Adam, gloo). Then a rank is killed under
`flatout run --devices 2`, once the first and once the second: how long until the next step?

Two nodes with a link of 1 Gbit/s train an MLP of 4 M parameters on images of 28x28 until a held-out
loss is reached: plain DistributedDataParallel, and Flatout with each of its reductions and with
ranks that meet every 20 steps, otherwise as plain. The nodes are network namespaces of this
machine, which takes root. `--data` names a folder of IDX files (MNIST).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import one_node
from convnet import from_idx
from flatout.data import idx_split
from restarts import PEERS, Peer, Row, ratio, run_in_turn, tell, versions
from results import Key, Results, add_arguments, finish, lines_of, positive, rows_as_data
from two_nodes import two_nodes, why_not

sys.path.append(str(PEERS))
from convnet_job import save
from nodes_job import BATCH, EVERY

PLAIN, PLAIN_4 = "plain-ddp", "plain-ddp-2x2"
MBIT = 1000
LOCAL = ("world.strategy=local_sgd", f"world.sync_every={EVERY}")
COMPRESSED = {name: f"world.compression={name}" for name in ("bf16", "fp16", "powersgd")}


# -- compression ---------------------------------------------------------------------------------


def compression_peers(images: Path, loss: float, nodes: Sequence[str]) -> list[Peer]:
    """On each node one rank; and two, where a hierarchy has something to do."""

    def peer(name: str, script: str, ranks: int, *settings: str) -> Peer:
        shared = ("--ranks", str(ranks), "--images", str(images), "--loss", str(loss))
        asked = [word for setting in settings for word in ("--set", setting)]
        arguments = ("--script", script, *shared, *asked, "--nodes", *nodes)
        return Peer(name, "nodes_start.py", arguments, ("torch", "flatout"))

    plain, flatout = "nodes_plain.py", "nodes_flatout.py"
    return [
        peer(PLAIN, plain, 1),
        peer("flatout", flatout, 1),
        *(peer(f"flatout-{name}", flatout, 1, asked) for name, asked in COMPRESSED.items()),
        peer("flatout-local-sgd", flatout, 1, *LOCAL),
        peer("flatout-ring", flatout, 1, "world.reduction=ring"),
        peer("flatout-to-one", flatout, 1, "world.reduction=to_one"),
        peer(PLAIN_4, plain, 2),
        peer("flatout-2x2-to-one", flatout, 2, "world.reduction=to_one"),
        peer("flatout-2x2-hierarchical", flatout, 2, "world.reduction=hierarchical"),
    ]


def compression_keys(rows: Mapping[str, Row]) -> list[Key]:
    ran = [name for name in COMPRESSED if rows[f"flatout-{name}"].measured]
    found: object = "no compression ran"
    note = ""
    if ran:
        best = min(ran, key=lambda name: median(rows[f"flatout-{name}"].seconds))
        found = ratio(rows, f"flatout-{best}", PLAIN)
        note = f"with {best}, the best of {len(ran)}"
    hierarchical = ratio(rows, "flatout-2x2-hierarchical", PLAIN_4)
    to_one = ratio(rows, "flatout-2x2-to-one", PLAIN_4)
    return [
        Key("compressed_time_to_loss", found, at_most=0.7, note=note),
        Key("flatout_time_to_loss", ratio(rows, "flatout", PLAIN), note="uncompressed"),
        Key(
            "local_sgd_time_to_loss",
            ratio(rows, "flatout-local-sgd", PLAIN),
            at_most=0.3,
            note=f"weights averaged every {EVERY} steps",
        ),
        Key("hierarchical_time_to_loss", hierarchical, note="two ranks on each node"),
        Key("to_one_time_to_loss", to_one, note="two ranks on each node"),
    ]


def compressed(arguments: argparse.Namespace, folder: str) -> dict[str, Row]:
    """Every way of adding up, in turn; none where there can be no nodes, or no images."""
    reason = "needs --data" if not arguments.data else why_not()
    if reason:
        tell(reason)
        return {
            peer.name: Row(peer, reason) for peer in compression_peers(Path(), arguments.loss, ())
        }
    images = Path(folder, "images.npz")
    save(images, *map(from_idx, idx_split(arguments.data)))
    with two_nodes(MBIT) as nodes:
        return run_in_turn(
            compression_peers(images, arguments.loss, nodes),
            restarts=arguments.restarts,
            only=arguments.only,
            tell=tell,
            figure=lambda seconds: f"{seconds:.2f} s",
        )


# -- the bench -----------------------------------------------------------------------------------


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, restarts=5)
    parser.add_argument("--data", metavar="DIR", help="a folder of IDX files")
    parser.add_argument("--loss", type=float, default=0.2, help="held-out, to be reached")
    parser.add_argument("--epochs", type=positive, default=10, help="timed epochs on one node")
    parser.add_argument("--samples", type=positive, default=4096, help="samples in such an epoch")
    peers = [*on_one_node(1, 1), *compression_peers(Path(), 1, ())]
    names = [peer.name for peer in peers]
    parser.add_argument("--only", nargs="+", default=(), choices=names, metavar="PEER")
    return parser.parse_args()


def on_one_node(epochs: int, samples: int) -> list[Peer]:
    return [*one_node.step_peers(epochs, samples), *one_node.recover_peers()]


def main() -> int:
    arguments = read_arguments()
    here = run_in_turn(
        on_one_node(arguments.epochs, arguments.samples),
        restarts=arguments.restarts,
        only=arguments.only,
        tell=tell,
    )
    with tempfile.TemporaryDirectory(prefix="flatout-bench-") as folder:
        apart = compressed(arguments, folder)
    rows = {**here, **apart}
    results = Results(
        title=f"Two ranks on one node, batch 128: ms a step, and from a kill to the next step. Two "
        f"nodes at {MBIT} Mbit/s, MLP of 4 M parameters, batch {BATCH}: s to a held-out loss of "
        f"{arguments.loss}. Restarts of each: {arguments.restarts}",
        headers=["", "median", "fastest .. slowest", "over raw-ddp, plain-ddp", "accuracy", ""],
        lines=[
            *lines_of(here, one_node.RAW, lambda seconds: f"{seconds * 1e3:,.2f}"),
            *lines_of(apart, PLAIN, lambda seconds: f"{seconds:.2f}"),
        ],
        remarks=[f"{name}: {note}" for name, row in apart.items() for note in row.notes[:1]],
        keys=[
            *one_node.step_keys(here),
            *one_node.recover_keys(here),
            *compression_keys(apart),
        ],
        data={
            "rows": [*rows_as_data(here, one_node.RAW), *rows_as_data(apart, PLAIN)],
            "versions": versions([row.peer for row in rows.values()]),
        },
    )
    return finish(results, arguments)


if __name__ == "__main__":
    sys.exit(main())
