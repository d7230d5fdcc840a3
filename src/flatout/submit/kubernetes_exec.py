"""A command in a container of a pod, as `kubectl exec` runs it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from flatout.errors import SubmitError
from flatout.submit.extras import require

# The channel on which the API server tells how a command has ended.
_STATUS = 3
# In the client's text of a refused websocket: what was refused, the headers, the server's answer.
_BETWEEN = " -+-+- "


def output_of(
    pod: str, space: str, container: str, command: Sequence[str], *, extra: str, patience_s: float
) -> str:
    """What a command prints on stdout."""
    where = f"pod {pod}"
    broken = (require("websocket", extra).WebSocketException, OSError)
    try:
        socket = _opened(pod, space, container, command, extra, patience_s)
        try:
            socket.run_forever(timeout=patience_s)
            is_open = socket.is_open()
            printed, errors = str(socket.read_stdout()), str(socket.read_stderr())
            status = str(socket.read_channel(_STATUS))
        finally:
            socket.close()
    except broken as error:
        raise SubmitError(f"the connection was lost: {error}", where=where) from error
    if is_open:
        raise SubmitError(f"expected an answer within {patience_s:g} s", where=where)
    problem = _problem(status, errors)
    if problem:
        raise SubmitError(f"{command[0]} failed in it: {problem}", where=where)
    return printed


def _opened(
    pod: str, space: str, container: str, command: Sequence[str], extra: str, patience_s: float
) -> Any:
    client = require("kubernetes.client", extra)
    stream = require("kubernetes.stream", extra).stream
    require("websocket", extra).setdefaulttimeout(patience_s)
    # `stream` changes the client that it is given: each thread needs its own.
    core = client.CoreV1Api(client.ApiClient())
    try:
        return stream(
            core.connect_get_namespaced_pod_exec,
            pod,
            space,
            container=container,
            command=list(command),
            stdin=False,
            stdout=True,
            stderr=True,
            tty=False,
            _preload_content=False,
        )
    except (client.exceptions.ApiException, AttributeError) as error:
        # Some versions of the client fail over an answer without a body, which is behind that.
        refused = error.__context__ if isinstance(error, AttributeError) else error
        if not isinstance(refused, client.exceptions.ApiException):
            raise
        raise SubmitError(
            f"Kubernetes does not let you in: {_refusal(str(refused.reason))}",
            where=f"pod {pod}",
            do="ask for the rights to get and create pods/exec; flatout jobs and logs need none",
        ) from error


def _problem(status: str, errors: str) -> str:
    told: dict[str, Any] = {}
    with suppress(ValueError):
        told = json.loads(status)
    if told.get("status") == "Success":
        return ""
    last = errors.strip().splitlines()[-1:]
    return str(last[0] if last else told.get("message") or "the connection was lost")


def _refusal(reason: str) -> str:
    what, *_, body = reason.split(_BETWEEN)
    with suppress(ValueError, KeyError, TypeError):
        return str(json.loads(body)["message"])
    return what
