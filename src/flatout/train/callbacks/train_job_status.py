"""Progress of a fit in the status of a Kubeflow TrainJob: `kubectl get trainjob NAME -o yaml`."""

from __future__ import annotations

import json
import os
import ssl
import threading
from datetime import UTC, datetime
from time import monotonic
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen

from flatout.console import say
from flatout.train.callbacks.callback import Callback
from flatout.train.callbacks.remaining import done_part

if TYPE_CHECKING:
    from flatout.train.state import FitState

_URL, _CA, _TOKEN = (f"KUBEFLOW_TRAINER_SERVER_{what}" for what in ("URL", "CA_CERT", "TOKEN"))
# Seconds between two requests; Kubeflow requires at least 5.
_EVERY_S = 10.0
_ANSWER_S = 5.0
# _LONGEST: maximum number of characters of a metric's name, and of its value. _MOST: maximum number
# of metrics.
_LONGEST, _MOST = 64, 32


def asked_for() -> list[Callback]:
    """Return the callback if the cluster has set the address."""
    return [TrainJobStatus()] if os.environ.get(_URL) else []


class TrainJobStatus(Callback):
    """Sends progress, remaining time and figures to Kubeflow's controller.

    A thread reads the state and sends it, so that no step waits. A failure to send is reported
    once, and training continues.

    https://www.kubeflow.org/docs/components/trainer: status of a TrainJob.
    """

    def __init__(self, every_s: float = _EVERY_S) -> None:
        self._every_s = every_s
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._has_failed = False

    def on_fit_start(self, state: FitState) -> None:
        """Start the thread that sends the status."""
        self._over.clear()
        self._began = monotonic(), done_part(state)
        self._thread = threading.Thread(target=self._watch, args=(state,), daemon=True)
        self._thread.start()

    def on_fit_end(self, state: FitState) -> None:
        """Send that training is complete, or its progress if it was stopped early."""
        self._end()
        self._send(state, 100 if state.stop_reason is None else None)

    def on_fit_error(self, state: FitState, error: BaseException) -> None:
        """Stop sending: Kubernetes detects how the job ends."""
        self._end()

    def _end(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(2 * _ANSWER_S)
            self._thread = None

    def _watch(self, state: FitState) -> None:
        while True:
            self._send(state)
            if self._over.wait(self._every_s):
                return

    def _send(self, state: FitState, percent: int | None = None) -> None:
        try:
            _post({"trainerStatus": self._status(state, percent)})
        except (OSError, ValueError, KeyError) as error:
            if not self._has_failed:
                say(f"progress cannot be reported to Kubeflow, training goes on: {error}")
            self._has_failed = True

    def _status(self, state: FitState, percent: int | None) -> dict[str, Any]:
        done = done_part(state)
        status: dict[str, Any] = {
            # Below 100 until the end: the last percent may include an evaluation and a checkpoint.
            "progressPercentage": min(99, int(100 * done)) if percent is None else percent,
            "lastUpdatedTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        at, before = self._began
        if percent == 100:
            status["estimatedRemainingSeconds"] = 0
        elif done > before:
            left = (monotonic() - at) * (1 - done) / (done - before)
            status["estimatedRemainingSeconds"] = int(min(left, 2**31 - 1))
        figures = [(name, f"{value:.6g}") for name, value in dict(state.logs).items()]
        status["metrics"] = [
            {"name": name[:_LONGEST], "value": value} for name, value in figures[:_MOST]
        ]
        return status


def _post(body: dict[str, Any]) -> None:
    with open(os.environ[_TOKEN]) as file:  # the token changes while the job runs
        token = file.read().strip()
    request = Request(
        os.environ[_URL],
        data=json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
    )
    context = ssl.create_default_context(cafile=os.environ[_CA])
    with urlopen(request, timeout=_ANSWER_S, context=context) as answer:
        answer.read()
