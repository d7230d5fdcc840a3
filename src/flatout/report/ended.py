"""The end of an observed script, in words for users."""

from __future__ import annotations

import signal

from flatout.doctor import FirstLook, Verdict


def ending_lines(look: FirstLook, verdict: Verdict | None) -> list[str]:
    if look.interrupted_by is not None:
        until = "what was seen until then is above" if verdict else "before anything was seen"
        name = signal.Signals(look.interrupted_by).name
        return [f"stopped by a signal ({name}), {until}; nothing runs on"]
    if look.failed:
        return [
            f"error: {_failure(look, verdict)}",
            *_last(look, verdict),
            *_refused(look, verdict),
        ]
    if verdict is None or not verdict.steps:
        when = f"in {look.seconds:.0f} s" if look.exit_code is None else "before it ended"
        notes = [note for rank in look.observations for note in rank.notes]
        return [
            f"the script took no optimizer step {when}",
            *[f"  {note}" for note in dict.fromkeys(notes)],
            "  do: if it trains later, give it less to do before; if another process or thread of "
            "it trains, give the doctor what that runs; if it is no training script, there is "
            "nothing to find",
            *[f"  {line}" for line in look.output[-3:]],
        ]
    return []


def _failure(look: FirstLook, verdict: Verdict | None) -> str:
    if "EOFError" in _error(look, verdict):
        return "the script asked for input, which it cannot have here: give it arguments instead"
    if look.exit_code is not None and look.exit_code < 0:
        hint = "; out of memory?" if look.exit_code == -signal.SIGKILL else ""
        return f"the script was ended by a signal ({signal.Signals(-look.exit_code).name}{hint})"
    return f"the script failed (exit code {look.exit_code})"


def _error(look: FirstLook, verdict: Verdict | None) -> str:
    return verdict.error if verdict else "\n".join(look.output)


def _last(look: FirstLook, verdict: Verdict | None) -> list[str]:
    error = verdict.error.strip().splitlines() if verdict else []
    return [f"  {line}" for line in (error[-8:] or look.output)]


def _refused(look: FirstLook, verdict: Verdict | None) -> list[str]:
    has_other_cause = (look.exit_code or 0) < 0 or "EOFError" in _error(look, verdict)
    if not look.held or has_other_cause:
        return []
    named = [f"  refused here: {item['what']} ({item['where']})" for item in look.refused[:3]]
    why = "it ran in a scratch copy, offline" if not named else "where it needs that"
    return [*named, f"  do: {why}; --in-place runs it as it is"]
