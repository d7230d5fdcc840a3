"""Strategies of two ranks on one node, side by side with what one writes by hand.

    python bench/strategies.py [--restarts 5] [--only KEY or PEER ...] [--json [FILE]]

An MLP of 5 M parameters, batch 256, one thread a rank, Adam, gloo. `fsdp`: a step beside a loop
with torch's own `fully_shard`, whose ranks are bound to a core each or not, whichever is faster;
and what a rank holds of parameters, gradients and the optimizer's state beside what one rank alone
does. `staged`: a step beside the ideal of its schedule, which follows from the step of one rank in
as many micro-batches and from the stages' shares of it. What a second busy core does to one rank's
step stands beside that: a step in stages keeps two busy.

`parameter_server`: seconds until a small model's held-out loss is reached by four ranks of which
one is three times slower (`peers/uneven_flatout.py`): where all wait for it, where no one does, and
where steps do without the slowest. And of four servers the largest share of a model with tensors
as unlike as Inception's beside the smallest, in bytes and in time (`peers/balanced_flatout.py`).
And a step of four hosts in network namespaces with slow links, with four more that are servers
alone, beside one with all_reduce (`peers/spare_hosts_flatout.py`; needs root).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from statistics import median

from flatout.measure import Interval, bootstrap_ratio
from restarts import PEERS, Peer, Row, ratio, run_in_turn, tell, versions
from results import Key, Results, add_arguments, finish, lines_of, positive, rows_as_data

sys.path.append(str(PEERS))
from strategies_job import BATCH, MICRO_BATCHES, ideal

TORCH, BOUND = "torch-fsdp", "torch-fsdp-bound"
FSDP, FSDP_AGAIN = "flatout-fsdp", "flatout-fsdp-again"
ONE, STAGED, STAGED_AGAIN = "flatout-one-rank", "flatout-staged", "flatout-staged-again"
BESIDE = "flatout-one-rank-beside"
SYNC, SYNC_AGAIN = "uneven-sync", "uneven-sync-again"
ASYNC, SPARE = "uneven-async", "uneven-spare"
SHARES = "shares-of-servers"
REDUCED, REDUCED_AGAIN, SERVED = "hosts-all-reduce", "hosts-all-reduce-again", "hosts-servers"
# What each key needs.
NEEDS = {
    "fsdp_vs_torch": (TORCH, BOUND, FSDP),
    "fsdp_vs_itself": (FSDP, FSDP_AGAIN),
    "fsdp_memory": (FSDP,),
    "staged_efficiency": (ONE, STAGED),
    "staged_vs_one_rank": (ONE, STAGED),
    "beside_another_vs_one_rank": (ONE, BESIDE),
    "staged_vs_itself": (STAGED, STAGED_AGAIN),
    "async_with_straggler": (SYNC, ASYNC),
    "spare_workers_with_straggler": (SYNC, SPARE),
    "straggler_vs_itself": (SYNC, SYNC_AGAIN),
    "servers_balanced": (SHARES,),
    "ps_sync_vs_all_reduce": (REDUCED, SERVED),
    "all_reduce_vs_itself": (REDUCED, REDUCED_AGAIN),
}


def peers_of(epochs: int, samples: int) -> list[Peer]:
    shared = ("--epochs", str(epochs), "--samples", str(samples))

    def flatout(name: str, strategy: str) -> Peer:
        arguments = (*shared, "--strategy", strategy)
        return Peer(name, "strategies_flatout.py", arguments, ("torch", "flatout"))

    def uneven(name: str, way: str) -> Peer:
        return Peer(name, "uneven_flatout.py", ("--way", way), ("torch", "flatout"))

    def hosts(name: str, way: str) -> Peer:
        return Peer(name, "spare_hosts_flatout.py", ("--way", way), ("torch", "flatout"))

    return [
        Peer(TORCH, "strategies_torch.py", shared, ("torch",)),
        Peer(BOUND, "strategies_torch.py", (*shared, "--bound"), ("torch",)),
        flatout(FSDP, "fsdp"),
        flatout(FSDP_AGAIN, "fsdp"),
        flatout(ONE, "one"),
        flatout(BESIDE, "beside"),
        flatout(STAGED, "staged"),
        flatout(STAGED_AGAIN, "staged"),
        uneven(SYNC, "sync"),
        uneven(SYNC_AGAIN, "sync"),
        uneven(ASYNC, "async"),
        uneven(SPARE, "spare"),
        Peer(SHARES, "balanced_flatout.py", (), ("torch", "flatout")),
        hosts(REDUCED, "all_reduce"),
        hosts(REDUCED_AGAIN, "all_reduce"),
        hosts(SERVED, "servers"),
    ]


def keys_of(rows: Mapping[str, Row]) -> list[Key]:
    again = "A/A: what noise makes of 1"
    measured = [name for name in (TORCH, BOUND) if rows[name].measured]
    best = min(measured, key=lambda name: median(rows[name].seconds), default=TORCH)
    return [
        Key("fsdp_vs_torch", ratio(rows, FSDP, best), at_most=1.03, note=f"over {best}"),
        Key("fsdp_vs_itself", ratio(rows, FSDP_AGAIN, FSDP), note=again),
        Key("fsdp_memory", held(rows[FSDP]), at_most=0.55, note="parameters, gradients, Adam"),
        Key("staged_efficiency", efficiency(rows), at_least=0.9, note=stages_words(rows[STAGED])),
        Key("staged_vs_one_rank", ratio(rows, STAGED, ONE)),
        Key(
            "beside_another_vs_one_rank",
            ratio(rows, BESIDE, ONE),
            note="one rank while another one runs the same",
        ),
        Key("staged_vs_itself", ratio(rows, STAGED_AGAIN, STAGED), note=again),
        Key(
            "async_with_straggler",
            ratio(rows, ASYNC, SYNC),
            at_most=0.6,
            note=uneven_words(rows, ASYNC, "gradients {staleness:.1f} steps old"),
        ),
        Key(
            "spare_workers_with_straggler",
            ratio(rows, SPARE, SYNC),
            at_most=0.7,
            note=uneven_words(rows, SPARE, "late gradients by rank: {late}"),
        ),
        Key("straggler_vs_itself", ratio(rows, SYNC_AGAIN, SYNC), note=again),
        Key("servers_balanced", unevenness(rows[SHARES]), at_most=1.1, note=shares_words(rows)),
        Key(
            "ps_sync_vs_all_reduce",
            ratio(rows, SERVED, REDUCED),
            at_most=1.0,
            note=hosts_words(rows),
        ),
        Key("all_reduce_vs_itself", ratio(rows, REDUCED_AGAIN, REDUCED), note=again),
    ]


def unevenness(row: Row) -> float | str:
    """The largest share over the smallest, in bytes or in time, whichever is more."""
    if not row.measured:
        return f"{row.peer.name}: {row.reason}"
    facts = [json.loads(note) for note in row.notes]
    each = [[median(fact[unit][n] for fact in facts) for n in range(4)] for unit in ("bytes", "ms")]
    return max(max(own) / min(own) for own in each)


def shares_words(rows: Mapping[str, Row]) -> str:
    if not rows[SHARES].measured:
        return ""
    fact = json.loads(rows[SHARES].notes[0])
    times = ", ".join(f"{one:.2f}" for one in fact["ms"])
    return f"{max(fact['bytes']) / 1e6:.1f} MB and {times} ms a step on four servers"


def hosts_words(rows: Mapping[str, Row]) -> str:
    if not rows[SERVED].measured:
        return ""
    fact = json.loads(rows[SERVED].notes[0])
    count = fact["hosts"]
    return f"{count} hosts at {fact['mbit']} Mbit/s, and {count} more with a server each"


def uneven_words(rows: Mapping[str, Row], name: str, more: str) -> str:
    """In how many epochs the loss was reached, and why not in as many."""
    if not (rows[name].measured and rows[SYNC].measured):
        return ""
    here, there = (json.loads(rows[one].notes[0]) for one in (name, SYNC))
    return f"{here['epochs']} epochs, sync {there['epochs']}; {more.format(**here)}"


def held(row: Row) -> float | str:
    """What a rank holds, over what one rank alone would."""
    if not row.measured:
        return f"{row.peer.name}: {row.reason}"
    facts = [json.loads(note) for note in row.notes]
    return median(one["held"] / one["whole"] for one in facts)


def efficiency(rows: Mapping[str, Row]) -> Interval | str:
    """The ideal of each restart's own cut over its step."""
    for name in (ONE, STAGED):
        if not rows[name].measured:
            return f"{name}: {rows[name].reason}"
    # The ideal is so many times one rank's step.
    times = median(ideal(1.0, json.loads(note)["shares"]) for note in rows[STAGED].notes)
    one = [times * seconds for seconds in rows[ONE].seconds]
    return bootstrap_ratio(one, rows[STAGED].seconds)


def stages_words(row: Row) -> str:
    if not row.measured:
        return ""
    shares = json.loads(row.notes[0])["shares"]
    return f"stages of {' | '.join(f'{share:.0%}' for share in shares)}"


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, restarts=5)
    parser.add_argument("--epochs", type=positive, default=5, help="timed epochs")
    parser.add_argument("--samples", type=positive, default=4096, help="in an epoch")
    names = [*NEEDS, *(peer.name for peer in peers_of(1, 1))]
    parser.add_argument("--only", nargs="+", default=(), choices=names, metavar="KEY")
    return parser.parse_args()


def main() -> int:
    arguments = read_arguments()
    rows = run_in_turn(
        peers_of(arguments.epochs, arguments.samples),
        restarts=arguments.restarts,
        only=[peer for name in arguments.only for peer in NEEDS.get(name, (name,))],
        tell=tell,
    )
    results = Results(
        title=f"Two ranks on one node, MLP of 5 M parameters, batch {BATCH}, stages in "
        f"{MICRO_BATCHES} micro-batches: ms a step; and four uneven ranks: ms until a loss is "
        f"reached. Restarts of each: {arguments.restarts}",
        headers=["", "median", "fastest .. slowest", f"over {TORCH}", "accuracy", ""],
        lines=lines_of(rows, TORCH, lambda seconds: f"{seconds * 1e3:,.2f}"),
        remarks=[],
        keys=keys_of(rows),
        data={
            "rows": rows_as_data(rows, TORCH),
            "versions": versions([row.peer for row in rows.values()]),
        },
    )
    return finish(results, arguments)


if __name__ == "__main__":
    sys.exit(main())
