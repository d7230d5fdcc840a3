"""A Job from a user's options, completed by the Recipe, the code, and this machine."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from flatout.errors import SubmitError
from flatout.measure import fingerprint
from flatout.recipe import Recipe, ResolvedRecipe, apply, load
from flatout.script_source import file_of
from flatout.submit.code import CodeArchive, collect
from flatout.submit.inputs import in_arguments, input_of, only_whole
from flatout.submit.job import Job, name_of
from flatout.submit.price import price_of
from flatout.submit.shell import VARIABLE
from flatout.world import check_servers_set

_TIMES = {"d": 86_400, "h": 3600, "m": 60, "s": 1}
_SECRET = re.compile(r"SECRET|TOKEN|PASSW|CREDENTIAL|(^|_)KEY($|_)|API_?KEY", re.I)


@dataclass(frozen=True)
class JobOptions:
    """The options of a user; None is left open.

    Attributes:
        script, is_module, arguments: as for `flatout run`.
        nodes, servers, threads, gpus, seeds, retries: as in Job.
        devices: ranks on each node; None lets the nodes measure the fastest number.
        time: the longest time, such as "2h", "1h30m" or "1:30:00".
        stop_ahead: such as "120s".
        name: the job's name.
        folder: the folder of all jobs' folders, relative to the code.
        recipe: a file.
        settings: FIELD=VALUE each.
        inputs: files that the script reads and its arguments do not name.
        shared: paths that all nodes see.
        checkpoint: the run folder.
        price, currency: the price of a node and hour.
        environment: NAME=VALUE each.
        options: NAME=VALUE each, for the target.
    """

    script: str
    is_module: bool = False
    arguments: tuple[str, ...] = ()
    nodes: int = 1
    devices: int | None = 1
    servers: int = 0
    threads: int | None = None
    gpus: int | None = None
    time: str | None = None
    stop_ahead: str = "120s"
    name: str | None = None
    folder: str = "submit"
    recipe: str | None = None
    settings: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    checkpoint: str | None = None
    seeds: tuple[int, ...] = ()
    retries: int = 3
    price: float | None = None
    currency: str | None = None
    environment: tuple[str, ...] = field(default=())
    options: tuple[str, ...] = ()


def job_of(asked: JobOptions, root: Path, now: datetime) -> Job:
    """Return the job of a user's options, with the code in the folder `root`.

    Raises:
        SubmitError: an option, the script or an input is not valid.
        RecipeError: the Recipe cannot be read, or a setting is not valid.
    """
    apply(Recipe(), asked.settings)  # or no node would take them
    script = _script(asked, root)
    recipe = None if asked.recipe is None else load(asked.recipe)
    base = (root / asked.folder).absolute()
    checkpoint = None if asked.checkpoint is None else _absolute(asked.checkpoint, root)
    # The files of earlier jobs are no code.
    named = dict.fromkeys((*asked.inputs, *in_arguments(asked.arguments, root)))
    paths = tuple(Path(os.path.normpath(root / item)) for item in named if "://" not in item)
    code = collect(root, without=(base, Path(checkpoint or base)), named=paths)
    is_command = script == "flatout" and not asked.is_module
    if is_command:
        code = CodeArchive((), 0)
    elif not asked.is_module and script not in code.files:
        raise SubmitError(
            "the script is not among the code that would travel",
            where=f"{root / script}",
            do="take it out of .gitignore",
        )
    inputs = tuple(input_of(item, root, code, asked.shared) for item in named)
    name = asked.name or _free(name_of("data.py" if is_command else script, now), base)
    threads = asked.threads or _measured_threads(recipe, asked.devices)
    if asked.servers:
        check_servers_set(asked.servers, asked.settings)
    return Job(
        name=name,
        script=script,
        root=root,
        folder=base / name,
        code=only_whole(code, inputs, root),
        is_module=asked.is_module,
        arguments=asked.arguments,
        nodes=asked.nodes,
        devices=1 if asked.devices is None else asked.devices,
        servers=asked.servers,
        is_auto=asked.devices is None,
        threads=threads or max(1, fingerprint().cpus // (asked.devices or 1)),
        has_measured_threads=threads is not None,
        gpus=_gpus(recipe, asked.devices) if asked.gpus is None else asked.gpus,
        time_s=None if asked.time is None else seconds(asked.time),
        stop_ahead_s=seconds(asked.stop_ahead),
        recipe=recipe,
        settings=asked.settings,
        fingerprint=_measured_on(recipe),
        environment=_environment(asked.environment),
        inputs=inputs,
        shared=asked.shared,
        checkpoint=checkpoint,
        seeds=asked.seeds,
        retries=asked.retries,
        price=price_of(asked.price, asked.currency),
        options=pairs(asked.options, "--option"),
    )


def _script(asked: JobOptions, root: Path) -> str:
    if asked.is_module or asked.script == "flatout":
        if asked.is_module and file_of(asked.script, is_module=True) is None:
            raise SubmitError(
                f"no module {asked.script} in the folder of the code", where=str(root)
            )
        return asked.script
    path = (root / asked.script).absolute()
    if not os.path.exists(path):
        raise SubmitError(f"{asked.script}: no such script (-m runs a module)", where=str(root))
    inside = os.path.relpath(os.path.normpath(path), root.absolute())
    if inside.startswith(".."):
        raise SubmitError(
            "the script is not in the folder of the code, which is the current one",
            where=str(path),
            do="cd to the folder that has the script and what it imports",
        )
    return Path(inside).as_posix()


def _free(name: str, base: Path) -> str:
    names = [name, *(f"{name}-{count}" for count in range(2, 1000))]
    return next((name for name in names if not os.path.exists(base / name)), name)


def _measured_threads(recipe: Recipe | ResolvedRecipe | None, devices: int | None) -> int | None:
    # A Recipe has measured the threads of one rank, not of a node.
    result = None if recipe is None or devices is None else recipe.process.threads
    return result if isinstance(result, int) else None


def _gpus(recipe: Recipe | ResolvedRecipe | None, devices: int | None) -> int:
    asked = "auto" if recipe is None else recipe.world.device
    is_on_gpu = bool(fingerprint().gpus) if asked == "auto" else asked.startswith("cuda")
    if is_on_gpu and devices is None:
        raise SubmitError("--devices auto, but not how many GPUs a node has", do="add --gpus N")
    return (devices or 0) if is_on_gpu else 0


def _measured_on(recipe: Recipe | ResolvedRecipe | None) -> str | None:
    if not isinstance(recipe, ResolvedRecipe):
        return None
    machine = recipe.machine
    parts = [str(machine.get("cpu", "")), f"{machine['cpus']} CPUs" if "cpus" in machine else ""]
    parts += [*map(str, machine.get("gpus", ())), f"torch {machine.get('torch', '')}"]
    return ", ".join(filter(None, parts))


def _environment(given: tuple[str, ...]) -> Mapping[str, str]:
    environment = pairs(given, "--env")
    for name in environment:
        if VARIABLE.fullmatch(name) is None:
            raise SubmitError(f"--env: expected a variable's name, found {name!r}")
        if name.startswith("PET_"):
            raise SubmitError(f"--env {name}: PET_ variables are set by the cluster alone")
        if _SECRET.search(name):
            raise SubmitError(
                f"--env {name}: it would be in the job's files for all to read",
                do="let the cluster give it: a secret of Kubernetes, a role, a file in your home",
            )
    return environment


def pairs(given: tuple[str, ...], option: str) -> dict[str, str]:
    result: dict[str, str] = {}
    for item in given:
        name, sign, value = item.partition("=")
        if not sign or not name:
            raise SubmitError(f"{option}: expected NAME=VALUE, found {item!r}")
        if name in result:
            raise SubmitError(f"{option} {name} is given twice")
        result[name] = value
    return result


def seconds(text: str) -> int:
    """Return the seconds of "2h", "1h30m", "90m", "1d", "1:30:00", or of a number of seconds."""
    clock = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if clock is not None:
        days, hours, minutes, rest = (int(group or 0) for group in clock.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + rest
    parts = re.findall(r"(\d+)([dhms]?)", text)
    if not parts or "".join(f"{n}{unit}" for n, unit in parts) != text:
        raise SubmitError(f"expected a time such as 2h, 1h30m or 1:30:00; found {text!r}")
    return sum(int(n) * _TIMES[unit or "s"] for n, unit in parts)


def ranks_of(text: str) -> int | None:
    """Return a number of ranks; None for "auto"."""
    if text == "auto":
        return None
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise SubmitError(f"--devices: expected a whole number above 0, or auto; found {text!r}")
    return int(text)


def seeds_of(text: str) -> tuple[int, ...]:
    """Return the seeds of a text such as "1,2,3" or "0-4"."""
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if match is None or int(match[2] or match[1]) - int(match[1]) not in range(1000):
            raise SubmitError(f"expected seeds such as 1,2,3 or 0-4; found {text!r}")
        seeds += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(dict.fromkeys(seeds))


def _absolute(path: str, root: Path) -> str:
    return path if "://" in path else os.path.normpath(root / path)
