"""SLURM: a batch script for sbatch, and calls of squeue, scontrol and scancel.

https://slurm.schedmd.com/sbatch.html
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from flatout import __version__
from flatout.errors import SubmitError
from flatout.measure import SUBMITTED
from flatout.submit import shell
from flatout.submit.client import Answer, ask, require_program
from flatout.submit.job import Job
from flatout.submit.send import top_words
from flatout.submit.shared import follow_file, output_of_nodes, unseen
from flatout.submit.target import (
    Artifact,
    JobState,
    NotSent,
    SentJob,
    State,
    UnknownOutcome,
    refuse,
)
from flatout.words import counted

SCRIPT, LOG, EXIT_CODE, CANCELED = "job.sbatch", "job.log", "exit_code", "canceled"
_TASK = "$SLURM_ARRAY_TASK_ID"
# Seconds between reports of a job's remaining time to the controller.
_TELL_EVERY_S = 300
# The messages of sbatch after which the controller may have taken the job.
_UNANSWERED = re.compile(
    r"timed out|Zero Bytes|Unexpected message|Communication|Message (send|receive) failure", re.I
)
_NOT_REACHED = re.compile(r"connect failure|Unable to contact slurm controller|Connection refused")
# The line that SLURM writes into the log of a job when it ends the job.
_ENDED = re.compile(
    rb"^slurmstepd\S* error: \*\*\* JOB \d+ ON \S+ CANCELLED AT \S+(?: DUE TO ([A-Z ]+))? \*\*\*",
    re.MULTILINE,
)
_END_OF_LOG = 1 << 18
_FORGOTTEN = "SLURM no longer lists the job"
_OPTION = re.compile(r"[a-z][a-z0-9-]*")
# The options of sbatch that Flatout writes itself.
_OURS = frozenset(
    (
        "job-name", "nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "gpus-per-node", "time",
        "signal", "requeue", "no-requeue", "open-mode", "chdir", "output", "error", "array",
        "comment", "parsable", "wrap", "test-only", "wait",
    )
)  # fmt: skip
# Options of sbatch that set the memory.
_MEMORY = frozenset(["mem", "mem-per-cpu", "mem-per-gpu"])
# Options for Flatout: the folder of its program on the nodes.
_OF_FLATOUT = ("bin",)
_BY_STATE = {
    "PENDING": State.queued,
    "REQUEUED": State.requeued,
    "REQUEUE_HOLD": State.requeued,
    "REQUEUE_FED": State.requeued,
    "SPECIAL_EXIT": State.requeued,
    "RESV_DEL_HOLD": State.queued,
    "CONFIGURING": State.starting,
    "RUNNING": State.running,
    "RESIZING": State.running,
    "SUSPENDED": State.queued,
    "STOPPED": State.queued,
    "SIGNALING": State.stopping,
    "STAGE_OUT": State.stopping,
    "COMPLETING": State.stopping,
    "COMPLETED": State.succeeded,
    "CANCELLED": State.canceled,
    "REVOKED": State.canceled,
    "PREEMPTED": State.requeued,
    "FAILED": State.failed,
    "TIMEOUT": State.failed,
    "OUT_OF_MEMORY": State.failed,
    "NODE_FAIL": State.failed,
    "BOOT_FAIL": State.failed,
    "DEADLINE": State.failed,
}


class _Slurm:
    """Sends batch scripts. All nodes must see the job's folder, with the code and the log."""

    name = "slurm"
    takes_seeds = True

    def artifacts(self, job: Job) -> list[Artifact]:
        refuse(_problems(job), where="--option", do="see `man sbatch`")
        return [Artifact(SCRIPT, script(job), 0o700)]

    def unseen(self, job: Job) -> list[str]:
        return unseen(job)

    def check(self, job: Job) -> list[str]:
        require_program("sbatch", "SLURM's client, Debian's slurm-client")
        # sbatch itself tries for some time to reach the controller.
        answer = ask(["sbatch", "--test-only", str(job.folder / SCRIPT)])
        message = answer.last_words.removeprefix("allocation failure: ")
        if _is_unanswered(answer):
            raise SubmitError(
                f"SLURM does not answer: {message}",
                where=f"nothing was sent: {job.folder}",
                do="try again when sinfo answers",
            )
        return [] if answer.code == 0 else [message]

    def send(self, job: Job, key: str) -> SentJob:
        require_program("sbatch", "SLURM's client, Debian's slurm-client")
        command = ["sbatch", "--parsable", f"--comment=flatout:{key}", str(job.folder / SCRIPT)]
        # Tried again only where no connection was made, so that nothing can have come.
        answer = ask(command, tries=3, again=lambda value: bool(_NOT_REACHED.search(value.errors)))
        if _NOT_REACHED.search(answer.errors):
            raise NotSent(f"SLURM cannot be reached: {answer.last_words}", where=str(job.folder))
        if answer.code == 0:
            number, _, cluster = answer.output.strip().partition(";")
            return SentJob(number, f"to the cluster {cluster}" if cluster else "")
        if _is_unanswered(answer):
            raise UnknownOutcome(f"no answer of sbatch: {answer.last_words}")
        raise NotSent(f"SLURM did not take the job: {answer.last_words}", where=str(job.folder))

    def find(self, key: str, folder: Path) -> SentJob | None:
        answer = _run_client(["squeue", "--me", "--states=all", "--noheader", "--format=%A %k"])
        for line in answer.output.splitlines():
            number, _, comment = line.strip().partition(" ")
            if f"flatout:{key}" in comment:
                return SentJob(number)
        return None

    def state(self, id: str, folder: Path) -> JobState:
        command = ["scontrol", "--oneliner", "show", "job", id]
        answer = ask(command, tries=2, again=_is_unanswered)
        if _is_unanswered(answer):
            raise SubmitError(f"SLURM does not answer: {answer.last_words}")
        answers = [
            _state_words(line) for line in answer.output.splitlines() if line.startswith("JobId=")
        ]
        if answer.code == 0 and answers:
            return _together([_state(item, folder) for item in answers])
        return _remembered(folder, id)

    def logs(self, id: str, folder: Path, *, follow: bool) -> Iterator[str]:
        _, _, task = id.partition("_")
        path = _log(folder, task)
        if not task and not path.exists() and list(folder.glob("job-*.log")):
            paths = ", ".join(sorted(item.stem[4:] for item in folder.glob("job-*.log")))
            raise SubmitError(f"{id} runs once for each seed: {paths}", do=f"flatout logs {id}_1")
        return follow_file(path, lambda: follow and not self.state(id, folder).state.is_final)

    def top(self, id: str, folder: Path, key: str) -> list[str]:
        require_program("srun", "SLURM's client, Debian's slurm-client")
        task = id.partition("_")[2]
        once = ["--overlap", "--ntasks-per-node=1", "--cpus-per-task=1", "--mem=0"]
        return output_of_nodes(
            folder,
            top_words(folder, f"{key}.{task}" if task else key),
            lambda nodes: ["srun", f"--jobid={id}", f"--nodes={nodes}", *once],
        )

    def cancel(self, id: str, folder: Path) -> None:
        _run_client(["scancel", id])
        task = id.partition("_")[2]
        with suppress(OSError):  # for some minutes SLURM itself knows that the job was canceled
            (folder / (f"{CANCELED}.{task}" if task else CANCELED)).touch()


TARGET = _Slurm()


def script(job: Job) -> str:
    lines = [
        "#!/bin/bash",
        *_about(job),
        *_directives(job),
        "",
        "here=$PWD",
        *shell.environment(job),
        *([f"{SUBMITTED}+=.{_TASK}"] if job.seeds else []),
        "",
    ]
    lines += [*shell.unpacking(job), ""]
    lines += [*_run(job), "", *_afterwards(job)]
    return "\n".join(lines) + "\n"


def _about(job: Job) -> list[str]:
    cpus = "" if job.is_auto else f", {counted(job.threads, 'CPU')} each"
    measured = f"; Recipe measured on {job.fingerprint}" if job.fingerprint else ""
    return [
        shell.comment(f"{job.name}: {job.size_words}{cpus}{measured}."),
        f"# Written by Flatout {__version__}; change what you like, then: sbatch {SCRIPT}",
    ]


def _directives(job: Job) -> list[str]:
    log = LOG.replace(".", "-%a.") if job.seeds else LOG
    folder = str(job.folder)
    rows = [
        ("job-name", job.name, ""),
        ("nodes", str(job.nodes), ""),
        ("ntasks-per-node", "1", "flatout run starts the ranks of its node"),
        (
            ("exclusive", "", "flatout run measures how many ranks a whole node is fastest with")
            if _takes_nodes(job)
            else ("cpus-per-task", str(job.cpus), "")
        ),
        *([("gpus-per-node", str(job.gpus), "")] if job.gpus else []),
        *_time(job),
        ("requeue", "", "after a preemption or the failure of a node"),
        ("open-mode", "append", "so the log of an earlier start stays"),
        ("chdir", _value(folder), ""),
        ("output", _value(f"{folder.replace('%', '%%')}/{log}"), ""),
        *([("array", ",".join(map(str, job.seeds)), "a task for each seed")] if job.seeds else []),
        *((name, _value(v), "") for name, v in job.options.items() if name not in _OF_FLATOUT),
    ]
    if not _MEMORY & {name for name, _, _ in rows}:
        whole = ("mem", "0", "all memory of the node: no other job runs on it")
        rows += [whole] if _takes_nodes(job) else []
    lines = [f"#SBATCH --{name}" + (f"={value}" if value else "") for name, value, _ in rows]
    lines = [
        f"{line:<36} # {why}" if why else line
        for line, (_, _, why) in zip(lines, rows, strict=True)
    ]
    if not _MEMORY & {name for name, _, _ in rows}:
        lines.append("# Memory: the partition's default. To ask for more: --option mem=16G")
    return lines


def _time(job: Job) -> list[tuple[str, str, str]]:
    if job.time_s is None:
        return []
    minutes, seconds = divmod(job.time_s, 60)
    hours, minutes = divmod(minutes, 60)
    ahead = f"USR1@{job.stop_ahead_s}"
    return [
        ("time", f"{hours}:{minutes:02}:{seconds:02}", ""),
        ("signal", ahead, "ahead of the limit: a last checkpoint"),
    ]


def _run(job: Job) -> list[str]:
    seed = _TASK if job.seeds else ""
    ranks = job.devices_option if job.ranks > 1 or job.is_auto else []
    lines = shell.array("command", shell.words(job.command_with(*ranks), seed))
    return [
        *([*shell.SECRET, ""] if job.nodes > 1 else []),
        *lines,
        *([] if job.is_command else _comments(job)),
        f'touch "$here"/started{_suffix(job)}',
        *_srun(job),
        "code=$?",
        'cd "$here" || exit 1',
        f'echo "$code" > {EXIT_CODE}{_suffix(job)}',
    ]


def _srun(job: Job) -> list[str]:
    cpus = "SLURM_CPUS_ON_NODE" if _takes_nodes(job) else "SLURM_CPUS_PER_TASK"
    start = f'srun --cpus-per-task="${cpus}"'
    if ":" not in job.arguments:
        return [f'{start} "${{command[@]}}"']
    return [
        "# srun takes a lone : for its own, so the command goes through bash.",
        f"""{start} bash -c "exec $(printf '%q ' "${{command[@]}}")\"""",
    ]


def _takes_nodes(job: Job) -> bool:
    return job.is_auto and not job.has_measured_threads


def _comments(job: Job) -> list[str]:
    return [
        "",
        "# What is left of it is in its comment: squeue -O JobID,State,Comment",
        f'export {shell.REMAINING}="$here"/remaining{_suffix(job)}',
        f'ran="$here"/ran{_suffix(job)}.${{SLURM_RESTART_COUNT:-0}}  # for how long, for its cost',
        "next=0",
        "while sleep 30 && kill -0 $$ 2> /dev/null; do",  # no longer than this script
        '  echo "$SECONDS" > "$ran"',
        '  left=$(grep -o \'"remaining_s": [0-9]*\' "$FLATOUT_REMAINING" 2> /dev/null)',
        "  # Not more often, because the controller serves many jobs.",
        "  if [[ ! $left ]] || ((SECONDS < next)); then continue; fi",
        f"  next=$((SECONDS + {_TELL_EVERY_S}))",
        f"  scontrol update JobId={_task(job)} "
        """Comment="flatout:$(cat "$here/key" 2> /dev/null):$((${left##* } / 60 + 1))min\"""",
        "done &",
        'trap "kill $! 2> /dev/null" EXIT',
        "",
    ]


def _task(job: Job) -> str:
    return '"${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"' if job.seeds else '"$SLURM_JOB_ID"'


def _suffix(job: Job) -> str:
    return f'."{_TASK}"' if job.seeds else ""


def _afterwards(job: Job) -> list[str]:
    task = _task(job)
    killed = f"killed{_suffix(job)}"
    # A checkpoint outside of file systems cannot be checked here; flatout data resumes by itself.
    counts = job.is_command or (job.checkpoint is not None and "://" in job.checkpoint)
    codes = "137 | 138 | 143" if counts else "137"
    lines = [
        "case $code in",
        f"  {codes}) # killed, such as for want of memory: again, but not for ever",
        f"    echo >> {killed}",
        f"    if (($(wc -l < {killed}) <= {job.retries})); then scontrol requeue {task}; fi",
        "    ;;",
    ]
    if job.checkpoint is not None and not counts:
        where = shell.quoted(job.checkpoint, _TASK if job.seeds else "")
        lines += [
            "  138 | 143) # stopped ahead of the limit, or preempted: goes on from its checkpoint,",
            "    # if it has written one since it started",
            f"    if [[ $(find {where} -newer started{_suffix(job)} -print -quit) ]]; then",
            f"      scontrol requeue {task}",
            "    fi",
            "    ;;",
        ]
    return [*lines, "esac", 'exit "$code"  # a job that failed would fail again']


def _value(text: str) -> str:
    if not text.isprintable():
        raise SubmitError(f"expected one line of text for an option of sbatch, found {text!r:.200}")
    if re.fullmatch(r"[\w./:,@%+=\[\]-]+", text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _problems(job: Job) -> list[str]:
    problems = []
    for name, value in job.options.items():
        if _OPTION.fullmatch(name) is None:
            problems.append(f"expected an option of sbatch, such as partition=cpu; found {name!r}")
        elif name in _OURS:
            problems.append(f"--{name} is written by Flatout itself")
        elif not value.isprintable():
            problems.append(f"--{name}: expected one line of text; found {value!r}")
    if not str(job.folder).isprintable():
        problems.append(f"a batch script cannot name this folder: {job.folder!s:.80}")
    return problems


def _is_unanswered(answer: Answer) -> bool:
    return answer.code is None or any(
        item.search(answer.errors) for item in (_UNANSWERED, _NOT_REACHED)
    )


def _run_client(command: list[str]) -> Answer:
    require_program(command[0], "SLURM's client, Debian's slurm-client")
    answer = ask(command, tries=3, again=_is_unanswered)
    if answer.code != 0:
        raise SubmitError(f"{command[0]}: {answer.last_words}")
    return answer


def _state_words(line: str) -> dict[str, str]:
    return dict(re.findall(r"(\w+(?:/\w+)?)=(\S*)", line))


def _state(answer: dict[str, str], folder: Path) -> JobState:
    word = answer.get("JobState", "")
    state = _BY_STATE.get(word, State.lost)
    starts = int(answer.get("Restarts", "0")) + 1
    if state is State.queued and starts > 1:
        state = State.requeued
    reason = answer.get("Reason", "None")
    code, _, signal = answer.get("ExitCode", "0:0").partition(":")
    eta = re.match(r"flatout:\w*:((\d+)min)", answer.get("Comment", ""))
    task = answer.get("ArrayTaskId", "")
    since_s = _seconds(answer.get("RunTime", ""))
    return JobState(
        state=state,
        words=word if reason == "None" else f"{word} ({reason})",
        exit_code=(128 + int(signal) if int(signal or 0) else int(code))
        if state.is_final
        else None,
        nodes=tuple(filter(None, [answer.get("NodeList", "").replace("(null)", "")])),
        since_s=since_s,
        paid_s=(since_s or 0.0) + _earlier_s(folder, task if task.isdecimal() else "", starts),
        left_s=60.0 * int(eta[2]) if eta else None,
        eta=eta[1] if eta else "",
        starts=starts,
    )


def _earlier_s(folder: Path, task: str, starts: int) -> float:
    name = f"ran.{task}" if task else "ran"
    ran = 0.0
    for start in range(starts - 1):
        with suppress(OSError, ValueError):
            ran += int((folder / f"{name}.{start}").read_text())
    return ran


def _together(states: list[JobState]) -> JobState:
    if len(states) == 1:
        return states[0]
    order = list(State)
    first = min(states, key=lambda value: (value.state.is_final, -order.index(value.state)))
    counts = {item: sum(each.state is item for each in states) for item in State}
    words = ", ".join(f"{n} {value}" for value, n in counts.items() if n)
    failed = [state.exit_code for state in states if state.exit_code]
    return JobState(
        state=first.state,
        words=words,
        exit_code=failed[0] if failed else first.exit_code,
        nodes=tuple(sorted({node for state in states for node in state.nodes})),
        since_s=max((state.since_s or 0 for state in states), default=None),
        paid_s=sum(state.paid_s or 0 for state in states),
        starts=max(state.starts for state in states),
    )


def _remembered(folder: Path, id: str) -> JobState:
    _, _, task = id.partition("_")
    name = f"{EXIT_CODE}.{task}" if task else EXIT_CODE
    with suppress(OSError, ValueError):
        code = int((folder / name).read_text())
        began = (folder / name.replace(EXIT_CODE, "started")).stat().st_mtime
        ran = (folder / name).stat().st_mtime - began
        if ran >= 0:  # a negative time means that an earlier start wrote the exit code
            state = State.failed if code else State.succeeded
            return JobState(state, _FORGOTTEN, exit_code=code, since_s=ran)
    marks = (CANCELED, name.replace(EXIT_CODE, CANCELED))
    is_canceled = any((folder / mark).exists() for mark in marks)
    why = "" if is_canceled else _why_slurm_ended_it(folder, task)
    if why == "":
        return JobState(State.canceled, _FORGOTTEN)
    if why == "TIME LIMIT":
        return JobState(State.failed, f"TIMEOUT; {_FORGOTTEN}")
    if folder.exists() and not any(folder.glob(f"job-{task}.log" if task else "job*.log")):
        return JobState(State.canceled, f"it never started; {_FORGOTTEN}")
    return JobState(State.ended, f"{_FORGOTTEN}; its accounts may: sacct -j {id}")


def _log(folder: Path, task: str) -> Path:
    return folder / (LOG.replace(".", f"-{task}.") if task else LOG)


def _why_slurm_ended_it(folder: Path, task: str) -> str | None:
    # The reason in a job's log: "" for a cancellation, None if the log has no reason.
    try:
        with _log(folder, task).open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _END_OF_LOG))
            reasons = _ENDED.findall(file.read())
    except OSError:
        return None
    return reasons[-1].decode() if reasons else None


def _seconds(text: str) -> float | None:
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(group or 0) for group in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
