"""The Profile of a run: its own measurements, as one JSON file in its folder.

    Profile.read("runs/today").steps.samples_per_s

The file is written while the job runs and at its end, each time whole. Unknown values are null or
absent, never guessed. Other versions of the schema are refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flatout.atomic_file import atomic_write, private
from flatout.errors import FlatoutError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

PROFILE_FILE = "profile.json"
"""The name of the file in a run folder."""

RUNS = "runs.jsonl"
"""The history of a run folder, lines of JSON: `began` and `ended` of each time that a job ran."""

SCHEMA, VERSION = "flatout.profile", 1
_NUMBER = (int, float)
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
"""The quantiles of a step's time and of its lanes."""

RunState = Literal["running", "ended", "interrupted", "failed"]


@dataclass(frozen=True)
class Resumed:
    """The checkpoint that a run was resumed from: its name, its step (from 0) and epoch."""

    checkpoint: str
    step: int
    epoch: int


@dataclass(frozen=True)
class Steps:
    """The optimizer steps of this process, on rank 0.

    Attributes:
        first, last: their numbers, from 1 in the run; a resumed run continues counting.
        samples: number of samples that they trained on, of all ranks.
        batch_size: median samples of a step, of all ranks; None if unknown.
        steady: number of steps that ran, warmed up, under the settings at the end of the run; the
            figures below are of these.
        step_ms: durations of the latest steady steps of the median batch size, in order. With local
            SGD each is the mean of the steps between two averages.
        per_s: [low, median, high], steps per second with the 95% interval that `median_of` gives;
            None without a steady step.
        samples_per_s: [low, median, high] of samples per second, in the same way.
        noise: relative difference of this process from itself, 0.01 is 1%: the median floor of its
            own A/A measurements; None without these.
    """

    first: int
    last: int
    samples: int
    batch_size: float | None
    steady: int
    step_ms: list[float] = field(default_factory=list)
    per_s: tuple[float, float, float] | None = None
    samples_per_s: tuple[float, float, float] | None = None
    noise: float | None = None


@dataclass(frozen=True)
class StepTimes:
    """Steps of a rank that runs alone, without communication.

    Attributes:
        local_batch: samples of each step.
        seconds: of each step.
    """

    local_batch: int
    seconds: list[float]


@dataclass(frozen=True)
class RanksOnHost:
    """Steps of several ranks at once on one host, each alone with its part of the CPUs.

    Attributes:
        ranks: number of ranks.
        local_batch: samples of a rank's step, whatever the number of ranks.
        seconds: of steps.
    """

    ranks: int
    local_batch: int
    seconds: list[float]


@dataclass(frozen=True)
class RankProfile:
    """The report of a rank.

    Attributes:
        rank: its number.
        node: the number of its host, from 0.
        host: its name.
        device: the device on which it computed, such as "cpu" or "cuda:0".
        threads: number of torch's threads.
        steps: number of steps at the time of the report.
        lanes_ms: milliseconds per step by lane, over all its steps.
        quantiles_ms: of its latest steady steps, 2,000 at most, by lane, and of "step" as a whole:
            five numbers, see `QUANTILES`.
        waited_ms: milliseconds per step of waiting for other ranks.
        use: over time, by column, see `flatout.measure.use.COLUMNS`.
        machine: the fingerprint of its host.
    """

    rank: int
    node: int
    host: str
    device: str
    threads: int
    steps: int
    lanes_ms: dict[str, float]
    quantiles_ms: dict[str, list[float]]
    waited_ms: float
    use: dict[str, list[float | None]]
    machine: dict[str, Any]


@dataclass(frozen=True)
class Profile:
    """A run's own measurements.

    Attributes:
        state: "running" while the run lives; it stays so if the run is killed.
        error: the error that ended the run, in one line, or None.
        began, written: Unix seconds of preparing the Loop, and of writing this.
        startup_s: seconds from the start of the process to the end of preparing.
        evaluation_s, saving_s: total seconds on rank 0.
        resumed: the checkpoint that the run was resumed from, or None. All figures are of the time
            after it.
        model: `name`, `parameters`, `trained`, the last two as numbers of values.
        job: identifies this job, in words, such as `loss` or `optimizer 1`.
        world: `size`, `nodes`, `ranks_per_node`, `strategy`, and with separate servers,
            `servers_apart`: the number of servers that compute nothing.
        versions: `flatout`, `torch`, `python`, and `keras` if it is used.
        network: `address`, `interface`, `mbit_per_s` of rank 0 if there are several ranks.
        recipe: `summary`, `values`, `reasons` and `measured`, by the names of the Recipe's fields.
        data: `words`, `digest`, `samples`, `batches`, `files`, `bytes`, `newest` (Unix seconds);
            `largest_batch`, if batches were made as large as memory allows.
        input: `bytes_per_sample` in batches, `samples_per_s` that the input could reach,
            `stages_ms` per batch of one thread, `threads`, `processes`, `waited` (a share).
        communication: `reduction`; `buckets`, each with `bytes` and `ready_ms` after the backward
            began; `sparse_bytes_per_step` that this rank sent; `bytes_per_average`, for local SGD
            and for a run of one rank, which would send this number there.
        ranks: the reports of ranks; only that of the first rank if the run was killed.
        epochs: `epoch` (from 1), `step`, `samples` and `at_s` (seconds) since this process began to
            train, and the figures of the epoch.
        notes: messages printed while training.
        step_times: by local batch, if `flatout run --profile-batches` asked for them.
        ranks_on_host: by number of ranks, if that option has measured them. The measurements of
            `--devices auto` are in `world`.
    """

    run: str
    command: list[str]
    kind: Literal["Trainer", "Keras", "Loop"]
    state: RunState
    error: str | None
    began: float
    written: float
    startup_s: float
    evaluation_s: float
    saving_s: float
    resumed: Resumed | None
    model: dict[str, Any]
    job: dict[str, str]
    world: dict[str, Any]
    versions: dict[str, str]
    network: dict[str, Any] | None
    recipe: dict[str, Any] | None
    data: dict[str, Any] | None
    input: dict[str, Any]
    communication: dict[str, Any]
    steps: Steps
    ranks: list[RankProfile]
    epochs: list[dict[str, Any]]
    notes: list[str]
    step_times: list[StepTimes] = field(default_factory=list)
    ranks_on_host: list[RanksOnHost] = field(default_factory=list)

    def write(self, folder: str | os.PathLike[str]) -> None:
        """Write the Profile into a run folder, whole or not at all.

        Raises:
            OSError: it cannot be written.
        """
        data = {"schema": SCHEMA, "version": VERSION, **vars(self)}
        text = json.dumps(data, allow_nan=False, default=vars)
        with atomic_write(Path(folder) / PROFILE_FILE, opener=private) as file:
            file.write(text + "\n")

    @classmethod
    def read(cls, run: str | os.PathLike[str]) -> Profile:
        """Read the Profile of a run folder, or a file.

        Raises:
            FlatoutError: there is none, it is of another version, or no Profile at all.
        """
        path = Path(run)
        file = path / PROFILE_FILE if os.path.isdir(path) else path
        try:
            data = json.loads(file.read_bytes())
        except OSError as error:
            raise FlatoutError(
                f"cannot read a Profile: {error.strerror}",
                where=str(file),
                do="name the folder of a run: Trainer(..., run=...) or Loop(run=...)",
            ) from error
        except (ValueError, RecursionError) as error:
            raise _no_profile(file, "it is no JSON") from error
        return cls._of(data, file)

    @classmethod
    def _of(cls, data: Any, file: Path) -> Profile:
        from pydantic import ValidationError

        if not isinstance(data, Mapping) or data.get("schema") != SCHEMA:
            raise _no_profile(file, f"its schema is not {SCHEMA!r}")
        if data.get("version") != VERSION:
            raise FlatoutError(
                f"the Profile is of version {data.get('version')!r}, and this Flatout reads "
                f"version {VERSION}",
                where=str(file),
                do="read it with the Flatout that wrote it, or train again with this one",
            )
        try:
            profile = _adapter().validate_python(data)
        except ValidationError as error:
            first = error.errors()[0]
            at = ".".join(map(str, first["loc"]))
            raise _no_profile(file, f"{at}: {first['msg']}") from error
        if missing := _missing(profile):
            raise _no_profile(file, missing)
        return profile


def profile_schema() -> dict[str, Any]:
    """Return the JSON Schema of a Profile's file."""
    schema = _adapter().json_schema()
    fixed = {"schema": {"const": SCHEMA}, "version": {"const": VERSION}}
    return {
        **schema,
        "properties": {**fixed, **schema["properties"]},
        "required": [*fixed, *schema["properties"]],
    }


def _missing(profile: Profile) -> str:
    parts: list[tuple[str, Mapping[str, Any], dict[str, Any]]] = [
        ("model", profile.model, {"name": str, "parameters": int, "trained": int}),
        ("world", profile.world, {"size": int, "nodes": int, "ranks_per_node": int}),
    ]
    if profile.data is not None:
        parts.append(("data", profile.data, {"words": str, "digest": str}))
    if profile.recipe is not None:
        parts.append(("recipe", profile.recipe, {"summary": str, "values": dict, "reasons": dict}))
    for epoch in profile.epochs:
        parts.append(("epochs", epoch, {"samples": int, "at_s": _NUMBER}))
    for bucket in profile.communication.get("buckets", ()):
        parts.append(("communication", bucket, {"bytes": int, "ready_ms": _NUMBER}))
    for part, values, wanted in parts:
        for name, kind in wanted.items():
            if not isinstance(values.get(name), kind):
                return f"{part}.{name} is {values.get(name)!r}"
    return "" if profile.ranks else "ranks are empty"


@cache
def _adapter() -> TypeAdapter[Profile]:
    from pydantic import TypeAdapter

    return TypeAdapter(Profile)


def _no_profile(file: Path, why: str) -> FlatoutError:
    return FlatoutError(
        f"expected the Profile of a run, found something else ({why})",
        where=str(file),
        do="train again, or name another run",
    )
