"""`flatout submit`: the work of `flatout run`, written as files for a cluster and sent there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument

from flatout.cli.common import Texts, agrees, option, print_json, with_options
from flatout.console import folded, printable, say_as_is
from flatout.words import counted

if TYPE_CHECKING:
    from flatout.submit import Artifact, Job, JobOptions, Price, Target

submit = typer.Typer(
    help="Write a job down for a cluster, show it, and send it there when you agree.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@dataclass(frozen=True)
class SubmitOptions:
    """Options of `flatout submit`."""

    is_module: bool = option(False, "The script is a module, as in python -m.", "-m")
    nodes: int = option(1, "How many.", "--nodes", "--nnodes", min=1)
    devices: str = option(
        "1",
        "Ranks on each node; auto lets the first node measure how many are fastest.",
        "--devices",
        "--nproc-per-node",
        metavar="N|auto",
    )
    servers: int | None = option(
        None,
        "Parameter servers that compute nothing, as in flatout run: on one node "
        "beside its ranks, of several one on each of the last.",
        min=1,
    )
    threads: int | None = option(
        None,
        "CPUs of each rank, or with --devices auto of each node. Default: as the "
        "Recipe has measured, or else each rank's share of the CPUs here.",
        min=1,
    )
    gpus: int | None = option(
        None,
        "On each node. Default: one for each rank, where the Recipe or this machine has any.",
        min=0,
    )
    time: str | None = option(None, "The most it may take: 2h, 1h30m, 1:30:00.")
    stop_ahead: str = option("120s", "How long before that the stop signal comes.")
    checkpoint: str | None = option(
        None,
        "Run folder that all nodes see. A job that starts again goes on from it.",
        "--checkpoints",
        metavar="FOLDER",
    )
    recipe: str | None = option(None, "A Recipe to run by.", metavar="FILE")
    settings: Texts = option(
        None, "A field of the Recipe; repeatable.", "--set", metavar="KEY=VALUE"
    )
    inputs: Texts = option(
        None, "What the script reads, besides its arguments.", "--input", metavar="PATH"
    )
    look: bool = option(
        False, "Run the script here for some seconds, contained, to see what it reads."
    )
    shared: Texts = option(
        None, "All nodes see it, on whichever disk it lies here.", metavar="PATH"
    )
    seeds: str | None = option(
        None, "Run once for each; {seed} in the arguments is it.", metavar="1,2,5-9"
    )
    retries: int = option(3, "How often it starts again after it was killed.", min=0)
    price: float | None = option(
        None, "Of a node for an hour: flatout jobs shows the cost so far and to come."
    )
    currency: str | None = option(None, "Of --price.", metavar="USD")
    environment: Texts = option(None, "For the script; repeatable.", "--env", metavar="NAME=VALUE")
    options: Texts = option(
        None, "Of the target, such as partition=cpu.", "--option", metavar="NAME=VALUE"
    )
    name: str | None = option(None, "Of the job. Default: script and time.")
    folder: str = option("submit", "In which each job has its own folder.")
    dry_run: bool = option(False, "Print all that would be sent; write nothing.")
    yes: bool = option(False, "Send it without asking.", "--yes", "-y")
    as_json: bool = option(False, "Print one JSON object; sends only with --yes.", "--json")


def _command(target: str) -> Callable[..., None]:
    @with_options
    def to_target(
        script: Annotated[
            str, Argument(help="A Python file, a module after -m, or: flatout data convert ...")
        ],
        args: Annotated[Texts, Argument(help="The script's own, passed on as they are.")] = None,
        *,
        options: SubmitOptions,
    ) -> None:
        from flatout.submit import JobOptions, inputs_seen, ranks_of, seeds_of

        known = {field.name for field in fields(JobOptions)}
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in vars(options).items()
            if name in known and value is not None
        }
        given["devices"] = ranks_of(options.devices)
        if options.seeds is not None:
            given["seeds"] = seeds_of(options.seeds)
        asked = JobOptions(script, arguments=tuple(args or ()), **given)
        if options.look:
            result = inputs_seen(asked, Path.cwd())
            if not options.as_json:
                _say(f"looked: it reads {', '.join(result) or 'nothing but code'}")
            asked = replace(asked, inputs=(*asked.inputs, *result))
        _submit(target, asked, dry_run=options.dry_run, yes=options.yes, as_json=options.as_json)

    return to_target


def _submit(name: str, asked: JobOptions, *, dry_run: bool, yes: bool, as_json: bool) -> None:
    from datetime import datetime

    from flatout.errors import SubmitError
    from flatout.submit import (
        Ledger,
        artifacts_of,
        job_of,
        refuse,
        runs_of,
        send_all,
        target_of,
        write,
    )

    to = target_of(name)
    jobs = runs_of(job_of(asked, Path.cwd(), datetime.now()), to)
    if dry_run:
        _print_all(jobs, to, [artifacts_of(job, to) for job in jobs], as_json)
        if any(to.unseen(job) for job in jobs):
            raise typer.Exit(1)
        return
    artifacts = [write(job, to) for job in jobs]
    if not as_json:
        _print_written(jobs, artifacts[0])
    where = f"nothing was sent: {jobs[0].folder}"
    refuse(list(dict.fromkeys(line for job in jobs for line in to.unseen(job))), where=where)
    try:
        problems = [line for job in jobs for line in to.check(job)]
    except SubmitError as error:
        raise SubmitError(error.what, where=error.where or where, do=error.do) from error
    refuse(list(dict.fromkeys(problems)), where=where)
    question = "send it?" if len(jobs) == 1 else f"send all {len(jobs)}?"
    otherwise = f"not sent: flatout submit {name} --yes sends without asking"
    agreed = yes or (not as_json and agrees(question, otherwise))
    sent = send_all(jobs, to, Ledger()) if agreed else []
    if as_json:
        _print_json(jobs, to, artifacts, [submission.id for submission in sent])
    for submission in [] if as_json else sent:
        id = submission.id
        line = f"submitted {id} {submission.words}".rstrip()
        ways = f"flatout jobs · flatout logs {id} -f · flatout cancel {id}"
        _say(f"{line} · {ways}")


def _say(line: str) -> None:
    typer.echo(folded(printable(line)))


def _short(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _print_written(jobs: list[Job], artifacts: list[Artifact]) -> None:
    job, *others = jobs
    first, *rest = artifacts
    parts = [f"wrote {_short(job.folder / first.name)} ({first.lines} lines)"]
    parts += [item.name for item in rest]
    parts += [f"code {job.code}"]
    _say(" · ".join(parts))
    if others:
        _say(f"  and {counted(len(others), 'more job')}, one for each seed")
    for file, why in job.code.left_out[:10]:
        _say(f"  not among the code: {file} ({why})")
    if len(job.code.left_out) > 10:
        _say(f"  and {len(job.code.left_out) - 10} more")
    for entry in job.inputs:
        _say(f"  data: {entry.words}")
    for line in _not_sent(job):
        _say(f"  {line}")
    if job.checkpoint is None and not job.is_command:
        _say("  no --checkpoints FOLDER: once stopped, it starts over unless the script sets run=")
    if job.price is not None:
        _say(f"  {_priced(job.price, jobs)}")
    if not (job.has_measured_threads or job.is_auto):
        _say(f"  {counted(job.threads, 'CPU')} for each rank, as here; say --threads N")


def _not_sent(job: Job) -> list[str]:
    from flatout.submit import named_in_code

    return [
        f"not sent: {file} ({code} names it); if the job reads it, pass --input {file}"
        for file, code in named_in_code(job.root, job.code, job.inputs)
    ]


def _priced(price: Price, jobs: list[Job]) -> str:
    words = f"{price.per_hour:g} {price.currency} for each node and hour"
    time_s = jobs[0].time_s
    if time_s is None:
        return words
    runs = len(jobs) * max(1, len(jobs[0].seeds))
    most = price.words(runs * price.of(jobs[0].nodes, time_s))
    return f"{words}: {most} at most, each time it starts"


def _print_all(jobs: list[Job], to: Target, artifacts: list[list[Artifact]], as_json: bool) -> None:
    if as_json:
        _print_json(jobs, to, artifacts, [])
        return
    job = jobs[0]
    for artifact in artifacts[0]:
        _say(f"== {_short(job.folder / artifact.name)}")
        typer.echo(printable(artifact.text))
    _say(f"== code: {job.code}")
    for file in job.code.files:
        _say(f"  {file}")
    for file, why in job.code.left_out:
        _say(f"  left out: {file} ({why})")
    for given in job.inputs:
        _say(f"data: {given.words}")
    for line in _not_sent(job):
        _say(line)
    if len(jobs) > 1:
        _say(f"and so for each seed: {', '.join(job.name for job in jobs[1:])}")
    for line in to.unseen(job):
        say_as_is(folded(f"would be refused: {line}", sys.stderr))


def _print_json(
    jobs: list[Job], to: Target, artifacts: list[list[Artifact]], ids: list[str]
) -> None:
    from flatout.submit import facts_of

    answer = [
        {
            "id": ids[number] if ids else None,
            "folder": str(job.folder),
            "artifacts": {artifact.name: artifact.text for artifact in artifacts[number]},
            "unseen": to.unseen(job),
            **facts_of(job, to),
        }
        for number, job in enumerate(jobs)
    ]
    print_json(answer[0] if len(answer) == 1 else {"jobs": answer})


def _add_targets() -> None:
    from flatout.submit import TARGETS

    for name, what in TARGETS.items():
        submit.command(
            name=name, help=f"{what}.", context_settings={"allow_interspersed_args": False}
        )(_command(name))


_add_targets()
