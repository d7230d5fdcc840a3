"""Explanation of an input pipeline, for the user."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from flatout.words import counted

# Fraction of time spent waiting for input above which the input bounds the rate of steps.
_BOUND = 0.05


@dataclass(frozen=True)
class Explanation:
    """Stages of a pipeline as written and as run, with their costs. `explain()` prints it.

    Attributes:
        written: stages in the order in which they were written.
        runs: stages in the order in which they run.
        notes: lines on why both orders give the same batches, and further lines for the user.
        stages: milliseconds of one thread per batch, by stage; empty before the first batch.
        threads: number of threads that make batches.
        trials: lines about the trials that found this number.
        waited: fraction of the time that the loop waited for a batch; None before it is known.
        padding: fraction of padding among the batches' values; None if rows are equally long.
        processes: number of processes that make batches in place of threads.
    """

    written: list[str]
    runs: list[str]
    notes: list[str]
    stages: dict[str, float]
    threads: int
    trials: list[str]
    waited: float | None
    padding: float | None
    processes: int = 0

    @classmethod
    def of(
        cls,
        program: Any,
        written: list[str],
        runs: list[str],
        notes: list[str],
        padding: float | None,
    ) -> Explanation:
        """Explain a program."""
        costs = getattr(program, "costs", None)
        tuner = getattr(program, "tuner", None)
        pool = getattr(program, "pool", None)
        here = getattr(program, "in_this_thread", False) or getattr(program, "quick", False)
        waited = None if tuner is None else tuner.waited_so_far
        return cls(
            written,
            runs,
            notes,
            {} if costs is None else costs.ms_per_batch(),
            0 if here or tuner is None or pool is not None else tuner.threads,
            [] if tuner is None else list(tuner.trials),
            waited,
            padding,
            0 if pool is None else pool.count,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the explanation as plain data."""
        return asdict(self)

    @property
    def bound(self) -> str:
        """Text that states whether input or model bounds the rate of steps."""
        if self.processes:
            return f"not known: {self.processes} processes make the batches, each counts for itself"
        if self.threads == 0:
            return "batches are made when they are asked for, in the thread that asks"
        if self.waited is None:
            return "not known yet: loop over some batches first"
        if self.waited > _BOUND:
            slowest = max(self.stages, key=self.stages.__getitem__, default="input")
            return f"INPUT: {self.waited:.0%} of the time is waiting, most of it for {slowest}"
        return f"the MODEL: {self.waited:.0%} of the time is waiting for input"

    def __str__(self) -> str:
        lines = [f"wrote  {' → '.join(self.written)}", f"runs   {' → '.join(self.runs)}"]
        if self.stages:
            width = max(map(len, self.stages))
            lines.append(f"{'stage':<{width}}  ms/batch")
            lines += [f"{name:<{width}}  {ms:8.3f}" for name, ms in self.stages.items()]
            whole = sum(self.stages.values())
            threads = counted(self.threads, "thread")
            lines.append(
                f"{'all':<{width}}  {whole:8.3f}  {threads if self.threads else ''}".rstrip()
            )
        lines += [f"tried {trial}" for trial in self.trials[-3:]]
        if self.padding is not None:
            lines.append(f"padding: {self.padding:.1%} of the values of ragged columns")
        lines += self.notes
        lines.append(f"bound by {self.bound}" if ":" in self.bound[:11] else self.bound)
        return "\n".join(lines)
