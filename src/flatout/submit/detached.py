"""A script that runs on a host without a scheduler: one start, a lock while it lives, an exit code.

The files in the job's folder on that host, where NAME is the node's name:

    NAME.lock           held as long as a process of the job lives;
    NAME.pid            id of the command, which gets the stop signal;
    NAME.log            output of the command;
    NAME.remaining      remaining time, as the run itself reports it
    NAME.exit_code      of the command, once it has ended
    NAME.canceled       exists once the job was canceled
"""

from __future__ import annotations

import shlex

from flatout.submit.shell import REMAINING
from flatout.submit.target import JobState, State
from flatout.words import clock

ABSENT = "it was never started"


def guard(name: str) -> list[str]:
    """Return lines that let a script run once only; `name` is for bash."""
    return [
        "here=$PWD",
        f"exec 9> {name}.lock  # held as long as a process of the job lives",
        f"if ! flock -n 9 || [[ -e {name}.begun ]]; then echo 'begun already'; exit 0; fi",
        f"touch {name}.begun",
        f"trap 'echo $? > \"$here\"/{name}.exit_code' EXIT",
    ]


def running(name: str) -> list[str]:
    """Return lines that run "${command[@]}", write its pid, and end with its exit code."""
    return [
        f'export {REMAINING}="$here"/{name}.remaining',
        '"${command[@]}" &',
        f'echo $! > "$here"/{name}.pid',
        "wait $!",
    ]


def start(script: str, name: str) -> str:
    """Return a command of sh that starts a script in its own session, and returns at once.

    The script gets the number at the end of its name, and the line that the command reads.
    """
    log = shlex.quote(f"{name}.log")
    number = name.rpartition("-")[2]
    run = f"setsid nohup bash {shlex.quote(script)} {number}"
    return f'IFS= read -r line; printf "%s\\n" "$line" | {run} >> {log} 2>&1 & echo started'


def read(name: str, follow: bool) -> str:
    """Return a command of sh that prints the log; with `follow` until the job has ended."""
    log, pid, code = (shlex.quote(f"{name}.{kind}") for kind in ("log", "pid", "exit_code"))
    if not follow:
        return f"cat {log}"
    wait = f"until [ -e {pid} ]; do sleep 0.2; done"
    return (
        f"if [ -e {code} ]; then cat {log}; else {wait}; tail -n +1 -f --pid=$(cat {pid}) {log}; fi"
    )


def ask(name: str) -> str:
    lock, code, canceled, begun, left = (
        shlex.quote(f"{name}.{kind}")
        for kind in ("lock", "exit_code", "canceled", "begun", "remaining")
    )
    began = f"$(stat -c %Y {begun})"
    return (
        f"if [ ! -e {begun} ]; then echo absent; "
        f"elif [ -e {code} ]; then "
        f"if [ -e {canceled} ]; then echo canceled; else echo ended; fi; "
        f"echo code=$(cat {code}) ran=$(( $(stat -c %Y {code}) - {began} )); "
        f"elif ! flock -n {lock} true; then "
        f"if [ -e {canceled} ]; then echo stopping; else echo running; fi; "
        f"echo ran=$(( $(date +%s) - {began} )) "
        f"left=$(grep -o '\"remaining_s\": [0-9]*' {left} 2> /dev/null | tr -dc 0-9); "
        "else echo lost; fi"
    )


def stop(name: str) -> str:
    lock, pid, canceled = (shlex.quote(f"{name}.{k}") for k in ("lock", "pid", "canceled"))
    return (
        f"touch {canceled}; while ! flock -n {lock} true; do "
        f"if [ -e {pid} ]; then kill -TERM $(cat {pid}); break; fi; sleep 0.1; done"
    )


def state_of(text: str) -> JobState:
    word, *pairs = text.split() or [""]
    fields = {
        name: int(n) for name, _, n in (pair.partition("=") for pair in pairs) if n.isdecimal()
    }
    ran, left, code = fields.get("ran"), fields.get("left"), fields.get("code")
    if word in ("running", "stopping"):
        eta = "" if left is None else clock(left)
        return JobState(State(word), since_s=ran, left_s=left, eta=eta)
    if word in ("canceled", "ended"):
        if code is None:  # the file is being written
            return JobState(State.stopping, since_s=ran)
        ended = State.failed if code else State.succeeded
        state = State.canceled if word == "canceled" else ended
        return JobState(state, exit_code=code, since_s=ran)
    if word == "absent":
        return JobState(State.lost, ABSENT)
    return JobState(State.lost, "its processes are gone, and left no exit code")


def together(states: dict[str, JobState]) -> JobState:
    """Return one state for all nodes: of a running node, or else of one that did not end well."""
    order = (
        *(State.stopping, State.running, State.failed, State.canceled),
        *(State.lost, State.succeeded),
    )
    host, result = min(states.items(), key=lambda value: order.index(value[1].state))
    # A node that has only lost another node tells less than that one.
    failed = [(h, s) for h, s in states.items() if s.state is State.failed]
    if result.state is State.failed:
        host, result = min(failed, key=lambda value: value[1].exit_code == 75)
    is_bad = result.state in (State.failed, State.lost) and len(states) > 1
    words = f"{host}: {result.words or f'exit code {result.exit_code}'}" if is_bad else result.words
    if failed and not result.state.is_final:
        words = ", ".join(f"{h} has failed with exit code {s.exit_code}" for h, s in failed)
    return JobState(
        state=result.state,
        words=words,
        exit_code=result.exit_code,
        nodes=tuple(states),
        since_s=max((state.since_s or 0 for state in states.values()), default=None),
        left_s=result.left_s,
        eta=result.eta,
    )
