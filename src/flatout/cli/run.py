"""`flatout run`: what a script needs before Python starts, then the script itself, as if called."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument

from flatout.cli.common import Texts, option, with_options
from flatout.console import say, say_as_is
from flatout.script_source import file_of, keras_backend, read

if TYPE_CHECKING:
    from flatout.recipe import Recipe
    from flatout.world import Nodes


@dataclass(frozen=True)
class RunOptions:
    """Options of `flatout run`."""

    is_module: bool = option(False, "The script is a module or package, as in python -m.", "-m")
    recipe: Path | None = option(None, "A Recipe to run by.", metavar="FILE")
    settings: Texts = option(
        None,
        "A field of the Recipe, such as process.threads=2. Can be given several times.",
        "--set",
        metavar="KEY=VALUE",
    )
    devices: str | None = option(
        None,
        "Ranks on this node: one for each GPU, or parts of the CPU; auto measures how "
        "many are fastest, on the first node. Default: what the cluster says, or 1.",
        "--devices",
        "--nproc-per-node",
        metavar="N|auto",
    )
    nodes: int | None = option(None, "How many nodes.", "--nodes", "--nnodes", min=1)
    node_rank: int | None = option(None, "Which node this is, from 0.", min=0)
    rendezvous: str | None = option(
        None,
        "Where the nodes meet: a free port on the first of them.",
        "--rendezvous",
        "--rdzv-endpoint",
        metavar="HOST:PORT",
    )
    servers: int | None = option(
        None,
        "Parameter servers that compute nothing, for world.strategy=parameter_server: on "
        "one node beside its ranks, of several one on each of the last nodes.",
        min=1,
    )
    checkpoints: str | None = option(
        None,
        "Run folder of a Trainer that names none. It goes on from what lies there.",
        metavar="FOLDER",
    )
    profile_batches: bool = option(
        False,
        "When a Trainer with a run folder has trained, measure steps on parts of its "
        "batch, and ranks beside each other, for its Profile: flatout forecast reads it.",
    )
    restarts: int = option(3, "How often ranks start again after one of them was killed.", min=0)
    wait: int = option(900, "How long nodes wait for one another.", min=1, metavar="SECONDS")
    dry_run: bool = option(False, "Print what would be run, and run nothing.")


@with_options
def run(
    script: Annotated[str, Argument(help="A Python file, or a module after -m.")],
    args: Annotated[Texts, Argument(help="The script's own, passed on as they are.")] = None,
    *,
    options: RunOptions,
) -> None:
    """Run a script by a Recipe, as python would.

    Arguments, standard input, exit code and signals pass through. A Trainer or Loop in the script
    takes the Recipe. In a script without them each part of the Recipe takes hold where it leads to
    the same training; what stays as written is said.
    """
    from flatout.world import SERVERS, asked_for

    is_auto, ranks = options.devices == "auto", _count(options.devices)
    if not options.is_module and not os.path.exists(script):
        raise typer.BadParameter(f"{script}: no such script (-m runs a module)")
    file = file_of(script, is_module=options.is_module)
    variables = _variables(options) | keras_backend(file)
    settings, servers = options.settings, options.servers
    given = [options.recipe is not None, bool(settings), bool(servers)]
    os.environ.pop(SERVERS, None)
    if servers:
        settings = _with_servers(settings or [], servers, is_auto)
        variables[SERVERS] = str(servers)
    if settings:
        variables["FLATOUT_SET"] = _after_inherited(settings)
    os.environ.update(variables)
    where = asked_for(ranks, options.nodes, options.node_rank, options.rendezvous, servers or 0)
    what = [*(["-m"] if options.is_module else []), script, *(args or [])]
    if is_auto and where.rank == 0:
        ranks = _measured(what, file, options.dry_run)
        where = asked_for(ranks, options.nodes, options.node_rank, options.rendezvous)
    elif is_auto:
        where = replace(where, ranks=None, is_open=True)
    starts = "flatout.strategies.start" if servers else "flatout.world.start"
    through = ["-m", starts] if where.is_world else []
    job = _Job(where, script, options.is_module, options.restarts, options.wait)
    # Without a Recipe the script starts at once and as it is: no setting is a default unmeasured.
    if not (os.environ.get("FLATOUT_RECIPE") or os.environ.get("FLATOUT_SET")):
        _start([sys.executable, *through, *what], variables, (), options.dry_run, job)
        return
    from flatout.devices import environment, set_affinity

    if where.is_world:
        _check_spoken()
    asked = _recipe_here()
    cpus = asked.process.affinity if isinstance(asked.process.affinity, tuple) else ()
    if cpus:
        set_affinity(cpus)
    cures = {} if servers or _trains_with_flatout(file) else _cures(asked)
    if cures:
        through = ["-m", "flatout.cures.start", *(["--rank"] if where.is_world else [])]
    variables |= _say_applied(asked, cures, given, options.dry_run)
    job = replace(job, timeout=asked.world.timeout, recipe=_asked_anywhere())
    start = [sys.executable, *through, *what]
    _start(start, variables | environment(asked), cpus, options.dry_run, job)


def _variables(options: RunOptions) -> dict[str, str]:
    variables = {"FLATOUT_RUN": "1"}
    if options.checkpoints is not None:
        is_url = "://" in options.checkpoints
        folder = options.checkpoints if is_url else os.path.abspath(options.checkpoints)
        variables["FLATOUT_CHECKPOINTS"] = folder
    if options.profile_batches:
        variables["FLATOUT_PROFILE_BATCHES"] = "1"
    if options.recipe is not None:
        variables["FLATOUT_RECIPE"] = os.path.abspath(options.recipe)
    return variables


@dataclass(frozen=True)
class _Job:
    """The options of several ranks in addition to the command of each rank."""

    where: Nodes
    script: str
    is_module: bool
    restarts: int
    wait: float
    timeout: float | None = None
    recipe: Mapping[str, object] = field(default_factory=dict)

    def launch(self, start: list[str]) -> int:
        # Flatout reports a lost connection here in its own words; the ranks keep torch's log.
        level = os.environ.get("TORCH_CPP_LOG_LEVEL")
        os.environ["TORCH_CPP_LOG_LEVEL"] = level or "ERROR"
        from flatout.world import TIMEOUT_S, facts_here
        from flatout.world.launch import launch

        if level is None:
            del os.environ["TORCH_CPP_LOG_LEVEL"]
        ranks = None if self.where.is_open else self.where.ranks or 1
        facts = facts_here(self.script, self.is_module, ranks, self.recipe)
        timeout = self.timeout or TIMEOUT_S
        return launch(start, self.where, self.restarts, facts, wait_s=self.wait, timeout_s=timeout)


def _count(devices: str | None) -> int | None:
    if devices is None:
        return None
    if devices == "auto":
        return 1
    if not (devices.isascii() and devices.isdecimal() and int(devices) > 0):
        raise typer.BadParameter(
            f"--devices: expected a whole number above 0, or auto; found {devices!r}"
        )
    return int(devices)


def _with_servers(settings: list[str], servers: int, is_auto: bool) -> list[str]:
    from flatout.world import check_servers_set

    if is_auto:
        raise typer.BadParameter("--devices auto measures ranks without servers: say --devices N")
    check_servers_set(servers, settings)
    return [*settings, f"world.servers={servers}"]


def _measured(what: list[str], file: Path | None, dry_run: bool) -> int:
    if dry_run:
        raise typer.BadParameter("--dry-run runs nothing, so nothing is measured: say --devices N")
    from flatout.world.choose import choose

    def command(ranks: int) -> list[str]:
        itself = [sys.executable, "-c", "from flatout.cli.main import main; main()", "run"]
        return [*itself, "--restarts", "0", "--devices", str(ranks), *what]

    return choose(command, file, say)


def _trains_with_flatout(file: Path | None) -> bool:
    source, imported = read(file)
    return "flatout" in imported and ("Trainer" in source or "Loop" in source)


def _cures(asked: Recipe) -> dict[str, object]:
    from flatout.cures import wanted
    from flatout.devices import at_start

    result = wanted(asked)
    # A script may set its number of threads itself once it runs.
    by_environment = set(at_start(asked)) - {"process.threads"}
    return result if set(result) - by_environment else {}


def _after_inherited(settings: list[str]) -> str:
    from flatout.recipe import from_set

    return json.dumps([*from_set(), *settings])


def _check_spoken() -> None:
    """Refuse settings of --set that do not go with its strategy, before anything starts."""
    from flatout.recipe import Recipe, apply, from_set
    from flatout.strategies import check_settings

    spoken = apply(Recipe(), from_set())
    if "world.strategy" in spoken.named():  # else the code may name a strategy
        check_settings(spoken)


def _recipe_here() -> Recipe:
    from flatout.devices import affinity, reset_affinity, set_affinity
    from flatout.measure import fingerprint
    from flatout.recipe import ResolvedRecipe, effective, from_file

    result = from_file()
    if isinstance(result, ResolvedRecipe):
        # The script takes its fingerprint after the process was bound to CPUs, and so does this
        # code.
        cpus = result.process.affinity
        if isinstance(cpus, tuple) and affinity() >= set(cpus):
            set_affinity(cpus)
        here, differences = result.on_this_machine(fingerprint().as_dict())
        if not here:
            say_as_is(f"the Recipe is of another machine ({differences[0]}): auto decides again")
            result = result.for_other_machine()
            reset_affinity()
    return effective(file=result)


def _asked_anywhere() -> dict[str, object]:
    from flatout.recipe import ResolvedRecipe, effective, from_file

    result = from_file()
    asked = result.request() if isinstance(result, ResolvedRecipe) else result
    return dict(effective(file=asked).named())


def _say_applied(
    asked: Recipe, cures: Mapping[str, object], given: list[bool], dry_run: bool
) -> dict[str, str]:
    """Print the settings that are applied to the script, and the settings that need a Trainer."""
    from flatout.cures import UNDO, words_of
    from flatout.devices import at_start
    from flatout.recipe import PLAIN, from_set

    taken = {**at_start(asked), **cures}
    # A Recipe file names every field; fields that equal plain torch are not reported.
    spoken = {setting.partition("=")[0].strip() for setting in from_set()}
    left = {
        field: value
        for field, value in asked.named().items()
        if field not in taken
        and value != "auto"
        and (field in spoken or value != PLAIN.get(field, "auto"))
    }
    if left.pop("memory.allocator", None):
        say_as_is("allocator=keep is not possible: glibc's allocator does not serve this process")
    names = ("--recipe", "--set", "--servers")
    options = [name for name, is_given in zip(names, given, strict=True) if is_given]
    options = options or ["FLATOUT_RECIPE and FLATOUT_SET from the environment"]
    waiting = f"; for a Trainer or Loop: {_short(left)}" if left else ""
    undo = f"; undo: drop {' and '.join(options)}"
    later = {} if dry_run else {field: cures[field] for field in cures.keys() - at_start(asked)}
    now = [words_of(field, value) for field, value in taken.items() if field not in later]
    if now or not later:
        begins = "would be applied" if dry_run else "applied"
        say_as_is(f"{begins}: {' '.join(now) or 'nothing'}{waiting}{undo}")
        waiting = ""
    return {UNDO: waiting + undo} if later else {}


def _short(fields: Mapping[str, object]) -> str:
    return " ".join(f"{field.rpartition('.')[2]}={value}" for field, value in fields.items())


def _start(
    start: list[str], variables: dict[str, str], cpus: tuple[int, ...], dry_run: bool, job: _Job
) -> None:
    if dry_run:
        added = [f"{name}={value}" for name, value in variables.items()]
        bound = ["taskset", "-c", ",".join(map(str, cpus))] if cpus else []
        ranks = f" # {job.where}" if job.where.is_world else ""
        typer.echo(shlex.join(["env", *added, *bound, *start]) + ranks)
        return
    if job.where.is_world:
        os.environ.update(variables)
        raise typer.Exit(job.launch(start))
    os.execve(sys.executable, start, {**os.environ, **variables})
