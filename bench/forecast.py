"""What a forecast says of more hosts beside what they give: up to four of them in namespaces.

    python bench/forecast.py [--restarts 1] [--only JOB ...] [--links LINK ...] [--keep FOLDER]
                             [--json [FILE]]

Links of 0.1, 1 and 10 Gbit/s, and of 1 Gbit/s with 1 ms and 10 ms of delay; ddp with each
reduction, and on links of 0.1 and 1 Gbit/s and with 1 ms a parameter server, local SGD and sharded
tables. 16 samples for each rank, gradients of 8 MB, on 0.1 Gbit/s of 2 MB. Each is predicted twice:
from a run of one rank, and from that and a run of two, each with what was measured of the network
between two hosts. Which rows of tables are sent a run of one rank does not tell, so sharded tables
are predicted from two alone. The truth is the median step of a run on as many hosts, of local SGD
the mean.

All hosts share the CPUs of this machine, so computing is sleep, of 48 ms a step: as where GPUs
compute. What ranks add up and send is real, so that at 10 Gbit/s and above four hosts on few cores
hold one another up, which is no link's doing.

Runs stay in the FOLDER of `--keep`. Those that are there are not made again, only predicted, as
where the model has changed since.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from flatout.forecast import Forecast, ForecastOptions, Network, network_in, script, sizes_of
from flatout.measure import Profile
from lab import Host, lab, on_host, why_not
from restarts import PEERS, PeerFailed, each, end, start, tell
from results import Key, Results, add_arguments, figure, finish

HOSTS = (1, 2, 3, 4)
LINKS = {
    "0.1Gb": (100, 0.0),
    "1Gb": (1_000, 0.0),
    "10Gb": (10_000, 0.0),
    "1Gb-1ms": (1_000, 1.0),
    "1Gb-10ms": (1_000, 10.0),
}
# Their settings.
REDUCTIONS: dict[str, dict[str, Any]] = {
    name: {"world.reduction": name} for name in ("all_reduce", "ring", "to_one")
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "server": {"world.strategy": "parameter_server"},
    "local_sgd": {"world.strategy": "local_sgd", "world.sync_every": 8},
    "tables": {"world.tables": "sharded"},
}
JOBS = REDUCTIONS | STRATEGIES
# Where strategies are tried.
STRATEGY_LINKS = ("0.1Gb", "1Gb", "1Gb-1ms")
STEPS, NETWORK_S = 45, 20.0
_PORT = 29500
_PATIENCE_S = 600


@dataclass(frozen=True)
class Case:
    """One prediction.

    Args:
        link: Mbit/s, and ms of delay.
        job: of `JOBS`.
        measured: hosts of the largest run that it is predicted from.
        hosts: of which it is.
        truth: samples per second.
        low, middle, high: as predicted, with the 90% interval.
    """

    link: tuple[float, float]
    job: str
    measured: int
    hosts: int
    truth: float
    low: float
    middle: float
    high: float

    @property
    def error(self) -> float:
        return self.middle / self.truth - 1

    @property
    def is_covered(self) -> bool:
        return self.low <= self.truth <= self.high

    @property
    def line(self) -> list[str]:
        mbit, delay = self.link
        name = f"{mbit:g} Mbit/s{f', {delay:g} ms' if delay else ''}, {self.job}"
        return [
            f"{name}, from {self.measured}",
            str(self.hosts),
            f"{self.truth:,.0f}",
            f"{self.middle:,.0f}",
            f"{self.low:,.0f} .. {self.high:,.0f}",
            f"{self.error:+.1%}",
            "" if self.is_covered else "outside",
        ]


def run_on(hosts: Sequence[Host], command: Sequence[str]) -> list[str]:
    """Run `flatout run` with a rank on each host, and return what the first has printed."""
    itself = [sys.executable, "-c", "from flatout.cli.main import main; main()"]
    processes = []
    for number, host in enumerate(hosts):
        nodes = ["--nodes", str(len(hosts)), "--node-rank", str(number)]
        nodes += ["--rendezvous", f"{hosts[0].address}:{_PORT}"]
        started = [*on_host(host), *itself, "run", "--restarts", "0"]
        more = nodes if len(hosts) > 1 else []
        processes.append(start([*started, *more, *command], Path.cwd()))
    try:
        said = [process.communicate(timeout=_PATIENCE_S) for process in processes]
    finally:
        for process in processes:
            end(process)
    if any(process.returncode for process in processes):
        raise PeerFailed("\n".join(out + err for out, err in said)[-2_000:])
    return said[0][0].splitlines()


def train(hosts: Sequence[Host], job: str, width: int, folder: Path) -> Profile:
    """The Profile of the job on these hosts; the folder may hold it."""
    if folder.exists():
        return Profile.read(folder)
    settings = [word for name, value in JOBS[job].items() for word in ("--set", f"{name}={value}")]
    if len(hosts) == 1 and job in STRATEGIES:
        settings = []  # a rank alone has none
    command = [*settings, str(PEERS / "forecast_job.py"), str(folder)]
    command += ["--ranks", str(len(hosts)), "--steps", str(STEPS), "--width", str(width)]
    run_on(hosts, [*command, *(["--table"] if job == "tables" else [])])
    return Profile.read(folder)


def predict_all(
    link: tuple[float, float], jobs: Sequence[str], restarts: int, folder: Path, found: list[Case]
) -> None:
    """Add all predictions for one kind of link."""
    if why := why_not():
        raise PeerFailed(why)
    width = 512 if link[0] > 100 else 256
    with lab(max(HOSTS), *link) as hosts:
        network: Network | None = None
        for job in jobs:
            runs = {
                (count, turn): train(hosts[:count], job, width, folder / f"{job}-{count}-{turn}")
                for count in HOSTS
                for turn in range(restarts)
            }
            if network is None:
                network = network_of(hosts[:2], runs[2, 0], folder)
                tell(f"{link}: {network.links[0]}")
            truth = {
                count: median(rate_of(runs[count, turn]) for turn in range(restarts))
                for count in HOSTS
            }
            for measured in (2,) if job == "tables" else (1, 2):
                names = [runs[count, 0].run for count in range(1, measured + 1)]
                found += _predicted(link, job, names, network, truth)
                tell("\n".join("  ".join(case.line) for case in found[-max(HOSTS) + measured :]))


def network_of(hosts: Sequence[Host], run: Profile, folder: Path) -> Network:
    """What was measured between these hosts, at the run's bucket sizes; the folder may hold it."""
    kept = folder / "network.json"
    if not kept.exists():
        probe = folder / "probe.py"
        probe.write_text(script(sizes_of(run), NETWORK_S))
        network = network_in(run_on(hosts, [str(probe)]))
        kept.write_text(network.model_dump_json(by_alias=True))
    return Network.model_validate_json(kept.read_text())


def _predicted(
    link: tuple[float, float],
    job: str,
    runs: list[str],
    network: Network,
    truth: dict[int, float],
) -> list[Case]:
    more = tuple(count for count in HOSTS if count > len(runs))
    asked = ForecastOptions(hosts=more, network=network, keeps_rank_batch=True, settings=JOBS[job])
    (side,) = Forecast.of(runs, asked).sides
    return [
        Case(
            link, job, len(runs), point.hosts, truth[point.hosts],
            point.rate.low, point.rate.middle, point.rate.high,
        )
        for point in side.points
    ]  # fmt: skip


def rate_of(profile: Profile) -> float:
    """Samples per second, by the median step; of local SGD by the mean from average to average."""
    assert profile.steps.batch_size is not None
    return profile.steps.batch_size / median(profile.steps.step_ms) * 1e3


def regret_of(cases: Sequence[Case]) -> float:
    """How much slower the number of hosts that is predicted to be fastest is than the fastest.

    The largest over all links and jobs, predicted from two ranks.
    """
    found = []
    for key in {(case.link, case.job) for case in cases}:
        own = [c for c in cases if (c.link, c.job) == key and c.measured == 2]
        chosen = max(own, key=lambda case: case.middle)
        found.append(1 - chosen.truth / max(case.truth for case in own))
    return max(found)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser, restarts=1)
    parser.add_argument("--only", nargs="+", default=list(JOBS), choices=JOBS)
    parser.add_argument("--links", nargs="+", default=list(LINKS), choices=LINKS)
    parser.add_argument("--keep", type=Path, help="where runs stay, and are read from")
    return parser.parse_args()


def main() -> int:
    arguments = read_arguments()
    cases: list[Case] = []
    with tempfile.TemporaryDirectory(prefix="flatout-bench-") as folder:

        def measure(link: str) -> None:
            own = (arguments.keep or Path(folder)).absolute() / link
            own.mkdir(parents=True, exist_ok=True)
            jobs = [job for job in arguments.only if job in REDUCTIONS or link in STRATEGY_LINKS]
            predict_all(LINKS[link], jobs, arguments.restarts, own, cases)

        each(arguments.links, measure)
    results = Results(
        title=f"Samples per second on more hosts. Restarts of each: {arguments.restarts}",
        headers=["", "hosts", "measured", "predicted", "90% interval", "error", ""],
        lines=[case.line for case in cases],
        remarks=["links with a delay are carried by bench/delayed_links.py, the others by tbf"],
        keys=[
            Key("lab_error", figure(lambda: median(abs(c.error) for c in cases)), at_most=0.06),
            Key(
                "lab_covered",
                figure(lambda: sum(case.is_covered for case in cases) / len(cases)),
                at_least=0.85,
                at_most=0.97,
                note=f"of {len(cases)} predictions",
            ),
            Key("decision_regret", figure(lambda: regret_of(cases)), at_most=0.05),
        ],
        data={"cases": [vars(case) for case in cases]},
    )
    return finish(results, arguments)


if __name__ == "__main__":
    sys.exit(main())
