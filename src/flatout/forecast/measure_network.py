"""`flatout forecast --measure`: pings and collectives between hosts, or between ranks of this one.

On several hosts the ranks are a job of `flatout submit ssh`, whose code is one small script.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from statistics import median
from time import monotonic

from flatout.errors import FlatoutError, WorldError
from flatout.forecast.network import Network
from flatout.measure import Profile, usable_cpus
from flatout.submit import (
    JobOptions,
    Ledger,
    exit_code,
    hosts_of,
    job_of,
    logs_of,
    refuse,
    send_once,
    target_of,
    write,
)
from flatout.words import counted, duration, size_words

_NAME = "measure_network.py"
_SCRIPT = """\
from flatout.forecast import probe

probe.main({sizes}, {seconds})
"""
# Maximum seconds to reach hosts, start Python and connect the ranks.
_PATIENCE_S = 180.0


def script(sizes: Sequence[int], seconds: float) -> str:
    """Return the script of the ranks; `network_in` reads its output."""
    return _SCRIPT.format(sizes=list(sizes), seconds=seconds)


def sizes_of(profile: Profile | None) -> list[int]:
    """Return the bytes of each tensor that a run reduces, or a series of sizes if unknown."""
    from flatout.forecast.probe import LADDER

    buckets = () if profile is None else profile.communication.get("buckets", ())
    own = {int(bucket["bytes"]) for bucket in buckets if bucket["bytes"] >= 4}
    # The smallest size shows the cost of a nearly empty message.
    return sorted({LADDER[0], *own}) if own else list(LADDER)


def measure_here(
    sizes: Sequence[int], say: Callable[[str], None], seconds: float, ranks: int = 0
) -> Network:
    """Measure between ranks of this machine.

    Args:
        sizes: bytes of each tensor that is reduced.
        say: function that is called with each line of progress text.
        seconds: approximate seconds that the measurement takes.
        ranks: number of ranks; 0 means one rank per usable CPU.

    Raises:
        WorldError: there is only one CPU, or the ranks fail.
    """
    ranks = ranks or usable_cpus()
    if ranks < 2:
        raise WorldError(
            "one CPU may be used here, so there are no two ranks to measure between",
            do="name hosts: --measure host1,host2, or a file with one in each line",
        )
    say(f"measuring {counted(ranks, 'rank')} of this host for about {seconds:.0f} s")
    with tempfile.TemporaryDirectory(prefix="flatout-network-") as folder:
        path = Path(folder) / _NAME
        path.write_text(script(sizes, seconds))
        itself = [sys.executable, "-c", "from flatout.cli.main import main; main()"]
        command = [*itself, "run", "--devices", str(ranks), "--restarts", "0", str(path)]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
        )
    return network_in(done.stdout.splitlines(), done.stderr.splitlines())


def measure_hosts(
    hosts: str,
    sizes: Sequence[int],
    say: Callable[[str], None],
    *,
    seconds: float,
    ranks_per_host: int = 1,
    options: tuple[str, ...] = (),
) -> Network:
    """Measure between hosts, over ssh.

    Args:
        hosts: "host1,host2", or a file with one host in each line.
        ranks_per_host: number of ranks on each host.
        options: texts NAME=VALUE, as for `flatout submit ssh --option`.

    Raises:
        SubmitError: a host cannot be reached, or lacks a program.
        FlatoutError: the ranks have failed on the hosts.
    """
    given = str(Path(hosts).absolute()) if "," not in hosts and os.path.isfile(hosts) else hosts
    with tempfile.TemporaryDirectory(prefix="flatout-network-") as folder:
        root = Path(folder)
        (root / _NAME).write_text(script(sizes, seconds))
        asked = JobOptions(
            script=_NAME,
            devices=ranks_per_host,
            gpus=0,
            retries=0,
            folder=str(Path("submit").absolute()),
            options=(f"hosts={given}", *options),
        )
        job = job_of(asked, root, datetime.now())
        job = replace(job, nodes=max(1, len(hosts_of(job))))
        if job.nodes * ranks_per_host < 2:
            raise WorldError(
                "one host with one rank has no network to measure",
                where=hosts,
                do="name more hosts, or measure ranks of this one: --measure here",
            )
        to = target_of("ssh")
        write(job, to)
    refuse(to.check(job), where=f"nothing was sent: {job.folder}")
    say(
        f"measuring {counted(job.nodes, 'host')}, {counted(ranks_per_host, 'rank')} each, for "
        f"about {seconds:.0f} s"
    )
    sent = send_once(job, to, Ledger())
    lines = list(_until(logs_of(sent.id, follow=True), monotonic() + seconds + _PATIENCE_S))
    code = exit_code(sent.id)
    return network_in(lines, lines if code else [])


def _until(lines: Iterable[str], deadline: float) -> Iterable[str]:
    for line in lines:
        yield line.rstrip("\n")
        if monotonic() > deadline:
            return


def network_in(lines: Sequence[str], errors: Sequence[str] = ()) -> Network:
    """Return the network that the first rank has printed, from the output of all ranks.

    Raises:
        FlatoutError: the ranks have printed no network; the message has their last lines.
    """
    from flatout.forecast.probe import LINE

    for line in lines:
        _, result, text = line.partition(LINE + "{")
        if result:
            return Network.model_validate_json("{" + text)
    raise FlatoutError(
        "the network was not measured: the ranks have failed",
        where="\n  ".join(["their last words:", *(errors or lines)[-15:]]),
    )


def words_of(network: Network) -> list[str]:
    """Return a line for each link, and a line for each size, with its fastest reduction first."""
    lines = [
        f"{' - '.join(link.between)}: round trip {duration(link.rtt_s)}, "
        f"{size_words(link.bytes_per_s)}/s"
        for link in network.links
    ]
    by_size: dict[float, list[tuple[float, str]]] = {}
    for collective in network.collectives:
        named = (median(collective.seconds), collective.reduction or collective.op)
        by_size.setdefault(collective.bytes, []).append(named)
    for size, value in by_size.items():
        each = ", ".join(f"{name} {duration(seconds)}" for seconds, name in sorted(value))
        lines.append(f"{size_words(size)}: {each}")
    return lines
