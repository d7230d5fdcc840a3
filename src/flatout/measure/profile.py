"""The Profile of a run: what it measured of itself, as one JSON file in its folder.

    Profile.read("runs/today").steps.samples_per_s

It is written while the job runs and at its end, each time whole. What a run does not know is null
or absent, never guessed. Other versions of the schema are refused.
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
"""What the file is called in a run folder."""

RUNS = "runs.jsonl"
"""The history of a run folder, lines of JSON: each time that a job ran, `began` and `ended`."""

SCHEMA, VERSION = "flatout.profile", 1
_NUMBER = (int, float)
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
"""Of a step and its lanes."""

RunState = Literal["running", "ended", "interrupted", "failed"]


@dataclass(frozen=True)
class Resumed:
    """Where a run went on from: the name of a checkpoint, its step (from 0 on) and epoch."""

    checkpoint: str
    step: int
    epoch: int


@dataclass(frozen=True)
class Steps:
    """The optimizer steps of this process, of rank 0.

    Attributes:
        first, last: their numbers, from 1 in the run; a resumed run goes on counting.
        samples: on how many they trained, of all ranks.
        batch_size: samples of a step at the median, of all ranks; None where that is not known.
        steady: how many ran, warmed up, under the settings that the run ended with; the figures
            below are of these.
        step_ms: durations of the latest steady steps of the median batch size, in order; of local
            SGD each is the mean of the steps from one average to the next that end with it.
        per_s: [low, median, high], steps per second with the 95% interval that `median_of` gives;
            None without a steady step.
        samples_per_s: likewise.
        noise: by how much this process differs from itself, 0.01 is 1%: the median floor of its own
            A/A measurements; None where it made none.
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
    """Steps of one rank alone, without what ranks do together.

    Attributes:
        local_batch: samples of each.
        seconds: of each step.
    """

    local_batch: int
    seconds: list[float]


@dataclass(frozen=True)
class RanksOnHost:
    """Steps of several ranks at once on one host, each alone with its part of the CPUs.

    Attributes:
        ranks: how many.
        local_batch: samples of a rank's step, whatever the number of ranks.
        seconds: of steps.
    """

    ranks: int
    local_batch: int
    seconds: list[float]


@dataclass(frozen=True)
class RankProfile:
    """What a rank tells.

    Attributes:
        rank: its number.
        node: the number of its host, from 0.
        host: its name.
        device: where it computed, such as "cpu" or "cuda:0".
        threads: of torch.
        steps: how many it has made when it told.
        lanes_ms: milliseconds per step by lane, over all its steps.
        quantiles_ms: of its latest steady steps, 2,000 at most, by lane, and of "step" as a whole:
            five numbers, see `QUANTILES`.
        waited_ms: per step in which it waited for other ranks.
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
    """What a run measured of itself.

    Attributes:
        state: "running" while it does, and of one that was killed.
        error: what ended it, in one line; None where nothing did.
        began, written: Unix seconds, when the Loop was prepared, and this was written.
        startup_s: from the start of the process to the end of preparing, in seconds.
        evaluation_s, saving_s: in all, of rank 0, in seconds.
        resumed: where it went on from; None where it began. All figures are of what came after.
        model: `name`, `parameters`, `trained`, both in numbers.
        job: what identifies this job, in words, such as `loss` or `optimizer 1`.
        world: `size`, `nodes`, `ranks_per_node`, `strategy`, and where there are some,
            `servers_apart`: how many servers compute nothing.
        versions: `flatout`, `torch`, `python`, and `keras` where it is used.
        network: `address`, `interface`, `mbit_per_s` of rank 0 where there are several ranks.
        recipe: `summary`, `values`, `reasons` and `measured`, by the names of the Recipe's fields.
        data: `words`, `digest`, `samples`, `batches`, `files`, `bytes`, `newest` (Unix seconds);
            `largest_batch`, where batches were made as large as memory allows.
        input: `bytes_per_sample` as batches hold it, `samples_per_s` that the input could give,
            `stages_ms` per batch of one thread, `threads`, `processes`, `waited` (a share).
        communication: `reduction`; `buckets`, each with `bytes` and `ready_ms` after the backward
            began; `sparse_bytes_per_step` that this rank sent; `bytes_per_average`, of
            local SGD and of a run of one rank, which would send as many there.
        ranks: each of those that told; of one that was killed the first alone.
        epochs: `epoch` (from 1), `step`, `samples` and `at_s` (seconds) since this process began
            to train, and the figures of the epoch.
        notes: what was said while training.
        step_times: by local batch, where `flatout run --profile-batches` asked for them.
        ranks_on_host: by ranks, where that has measured them; what `--devices auto` has measured
            stands in `world`.
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
        """Write it into a run folder, whole or not at all.

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
