"""A job for any kind of cluster."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from flatout.errors import SubmitError
from flatout.recipe import Recipe, ResolvedRecipe
from flatout.submit.code import CodeArchive
from flatout.submit.inputs import Input
from flatout.submit.price import Price
from flatout.words import counted
from flatout.world import Nodes, check_servers

# https://www.rfc-editor.org/rfc/rfc1035#section-2.3.1, in lower case as Kubernetes wants it.
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LONGEST = 63
SEED = "{seed}"
"""The placeholder for the seed in the arguments of a job that runs once for each seed."""


@dataclass(frozen=True)
class Job:
    """A job, as each target writes it. Relative paths are within the code.

    Attributes:
        name: an RFC 1035 label of at most 63 letters, such as train-2026-11-26-1201.
        script: a path relative to `root`, with slashes; a module's name if `is_module`; "flatout"
            if the arguments are a command of Flatout's own, such as data convert.
        is_module: whether the script is a module, as in `python -m`.
        arguments: the script's own arguments, passed on unchanged.
        nodes: number of nodes.
        devices: number of ranks on each node that computes.
        servers: number of parameter servers that compute nothing, as for `flatout run`: on the
            ranks' node, or one on each of the last nodes.
        is_auto: whether the nodes measure the fastest number of ranks. Then `devices` is 1, and
            `threads` are the CPUs of a node.
        threads: CPUs of each rank.
        has_measured_threads: whether the user or the Recipe gave `threads`; else they are the share
            of this machine.
        gpus: GPUs of each node; 0 for a job on CPUs.
        time_s: the time limit in seconds, or None.
        stop_ahead_s: seconds from the stop signal to the time limit.
        recipe: the Recipe of the job.
        settings: fields of the Recipe by `--set`, such as compute.precision=bf16.
        fingerprint: description of the machine on which a resolved Recipe was measured.
        environment: variables for the job's processes.
        root: the folder of the code, here.
        folder: the absolute folder of the job's artifacts, here.
        code: the files of the code that are sent.
        inputs: the files and URLs that the script reads.
        shared: paths that all nodes see, by the user's `--shared`.
        checkpoint: the run folder, which all nodes see.
        seeds: the job runs once for each; `{seed}` in its arguments and `checkpoint` is replaced.
        retries: number of restarts after the job was killed.
        price: the price of a node, or None.
        options: options of the target, such as partition.
    """

    name: str
    script: str
    root: Path
    folder: Path
    code: CodeArchive
    is_module: bool = False
    arguments: tuple[str, ...] = ()
    nodes: int = 1
    devices: int = 1
    servers: int = 0
    is_auto: bool = False
    threads: int = 1
    has_measured_threads: bool = True
    gpus: int = 0
    time_s: int | None = None
    stop_ahead_s: int = 120
    recipe: Recipe | ResolvedRecipe | None = None
    settings: tuple[str, ...] = ()
    fingerprint: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    inputs: tuple[Input, ...] = ()
    shared: tuple[str, ...] = ()
    checkpoint: str | None = None
    seeds: tuple[int, ...] = ()
    retries: int = 3
    price: Price | None = None
    options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_name(self.name)
        if nul := [text for text in self._texts() if "\0" in text]:
            raise SubmitError(f"a text of a job cannot hold a NUL character; found {nul[0]!r}")
        wrong = [f"{what} is {n}" for what, n in (("nodes", self.nodes), ("devices", self.devices),
                 ("threads", self.threads)) if n < 1]  # fmt: skip
        if wrong:
            raise SubmitError(f"expected 1 or more; {', '.join(wrong)}")
        if self.time_s is not None and self.time_s <= self.stop_ahead_s:
            raise SubmitError(
                f"the stop signal comes {self.stop_ahead_s} s before the time limit, which is "
                f"{self.time_s} s",
                do="allow more time, or give --stop-ahead a smaller number",
            )
        if self.is_auto and self.is_command:
            raise SubmitError("--devices auto measures a script that trains, no command of Flatout")
        if self.servers:
            self._check_servers()
        self._check_seeds()

    def _texts(self) -> Iterator[str]:
        yield from (self.script, str(self.root), str(self.folder), self.checkpoint or "")
        yield from (*self.arguments, *self.settings, *self.shared)
        yield from (*self.environment, *self.environment.values())
        yield from (*self.options, *self.options.values())
        for item in self.inputs:
            yield from (item.given, item.path)

    def _check_servers(self) -> None:
        if self.is_auto or self.is_command:
            raise SubmitError(
                "--servers are for ranks that train: not with --devices auto, nor for a command of "
                "Flatout"
            )
        check_servers(Nodes(count=self.nodes, ranks=self.devices, servers=self.servers))

    def _check_seeds(self) -> None:
        marked = any(SEED in argument for argument in self.arguments)
        if self.seeds and not marked:
            raise SubmitError(
                "the job is to run once for each seed, but no argument says which it is",
                do=f"write {SEED} where the seed stands, such as --seed {SEED}",
            )
        if self.seeds and self.checkpoint is not None and SEED not in self.checkpoint:
            raise SubmitError(
                "the runs of all seeds would write the same checkpoints",
                where=self.checkpoint,
                do=f"write {SEED} in the path: {self.checkpoint}/{SEED}",
            )

    @property
    def computing(self) -> int:
        """The number of nodes with ranks."""
        return self.nodes - self.servers if self.nodes > 1 else 1

    @property
    def ranks(self) -> int:
        """The ranks of all nodes."""
        return self.computing * self.devices

    @property
    def cpus(self) -> int:
        """The CPUs of each node; a server on a node with ranks has one."""
        return self.devices * self.threads + (self.servers if self.nodes == 1 else 0)

    def of_seed(self, seed: int) -> Job:
        """Return the run of one seed as its own job."""

        def filled(text: str) -> str:
            return text.replace(SEED, str(seed))

        return replace(
            self,
            name=f"{self.name}-{seed}",
            folder=self.folder / f"seed-{seed}",
            arguments=tuple(map(filled, self.arguments)),
            checkpoint=None if self.checkpoint is None else filled(self.checkpoint),
            seeds=(),
        )

    @property
    def devices_option(self) -> list[str]:
        """The option of `flatout run` for the number of ranks."""
        return ["--devices", "auto" if self.is_auto else str(self.devices)]

    @property
    def size_words(self) -> str:
        """The numbers of nodes and ranks, for people."""
        ranks = "as many ranks as are fastest" if self.is_auto else counted(self.devices, "rank")
        words = f"{counted(self.computing, 'node')} of {ranks}"
        if not self.servers:
            return words
        where = "beside them" if self.nodes == 1 else "on nodes of their own"
        return f"{words}, {counted(self.servers, 'server')} {where}"

    @property
    def is_command(self) -> bool:
        """True if the job is a command of Flatout's own and no script."""
        return self.script == "flatout" and not self.is_module

    @property
    def command(self) -> list[str]:
        """The command for launchers that give the number of ranks."""
        return self.command_with()

    def command_with(self, *options: str, recipe: str = "../recipe.toml") -> list[str]:
        """Return the command that runs the script in the folder of the code.

        Args:
            options: options of `flatout run`, such as "--devices", "4".
            recipe: the path of the Recipe, seen from the code.
        """
        if self.is_command:
            return ["flatout", *self.arguments]
        by = ["--recipe", recipe] if self.recipe is not None else []
        by += [part for setting in self.settings for part in ("--set", setting)]
        by += ["--servers", str(self.servers)] if self.servers else []
        resumed = ["--checkpoints", self.checkpoint] if self.checkpoint is not None else []
        script = f"./{self.script}" if self.script.startswith("-") else self.script
        what = ["-m", self.script] if self.is_module else [script]
        return ["flatout", "run", *by, *resumed, *options, *what, *self.arguments]


def check_name(name: str) -> None:
    if len(name) > _LONGEST or _LABEL.fullmatch(name) is None:
        raise SubmitError(
            "expected a job's name of at most 63 small letters, digits and hyphens that begins "
            f"with a letter and does not end with a hyphen (RFC 1035); found {name!r}"
        )


def name_of(script: str, when: datetime) -> str:
    """Return a name for a job of a script: train-2026-11-26-1201."""
    stem = Path(script).stem if script.endswith(".py") else script.rpartition(".")[2]
    letters = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")
    if not letters[:1].isalpha():
        letters = f"job-{letters}".rstrip("-")
    return f"{letters[:40].rstrip('-')}-{when:%Y-%m-%d-%H%M}"
