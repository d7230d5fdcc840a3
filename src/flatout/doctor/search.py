"""Settings that may make a script faster, though no check found them: only a trial can tell.

    prove(widened(verdict), what, budget_s=600)

searches for the best Recipe over all these settings and all findings: each setting alone, then each
added to the settings that win, then all together, measured again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from flatout.doctor.finding import Finding
from flatout.doctor.judge import Verdict
from flatout.observe import Observation
from flatout.recipe import SETTINGS

_FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
_MARK = "search "


def is_searched(name: str) -> bool:
    """Return True if a finding of this name comes from the search, not from a check."""
    return name.startswith(_MARK)


def widened(verdict: Verdict) -> Verdict:
    """Return the verdict with a finding for each setting that could help, after the checks' own."""
    known = {
        field for finding in verdict.findings if finding.kind == "slow" for field in finding.recipe
    }
    more = [
        Finding(
            name=f"{_MARK}{field}",
            kind="slow",
            what="no check found this",
            do="see what a trial says",
            recipe={field: value},
        )
        for field, value in _settings(ScriptFacts(verdict.observations[0]))
        if field not in known
    ]
    return replace(verdict, findings=[*verdict.findings, *more])


def _settings(job: ScriptFacts) -> Iterator[tuple[str, Any]]:
    for field in sorted(SETTINGS, key=lambda field: not SETTINGS[field].of_input):
        trial = SETTINGS[field].trial
        if trial is not None and trial.fits(job):
            yield field, trial.value(job) if callable(trial.value) else trial.value


class ScriptFacts:
    """An observed script, with the facts that settings ask for."""

    # Facts that are not observed.
    has_tf32_units = may_be_slower_in_bf16 = has_fused_norms = has_large_tables = False
    can_graph = has_cudnn_choices = False

    def __init__(self, observation: Observation) -> None:
        convolutions = [model for model in observation.models if model.has_convolutions]
        self.cpus = observation.usable_cpus or 1
        self.threads = observation.threads
        self.workers = observation.workers
        self.is_on_cpu = self.returns_memory = observation.device.startswith("cpu")
        self.has_gpu = observation.device.startswith("cuda")
        self.has_convolutions = any(not model.is_channels_last for model in convolutions)
        self.has_rewrites = any(model.pool_after for model in observation.models)
        self.can_compile = observation.framework == "torch" and not any(
            m.is_compiled for m in observation.models
        )
        self.can_fuse = any(
            not optimizer.fused and optimizer.kind.split(".")[-1] in _FUSED
            for optimizer in observation.optimizers
        )
        self.could_use_bf16 = (
            bool(observation.bf16_units)
            and not any(model.autocast for model in observation.models)
            and all(
                "32" in dtype for optimizer in observation.optimizers for dtype in optimizer.dtypes
            )
        )
        self.pins_memory = all(loader.pin_memory for loader in observation.loaders)
        self.restarts_workers = any(
            loader.num_workers and not loader.persistent_workers for loader in observation.loaders
        )
