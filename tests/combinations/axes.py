"""Axes of the covering array, rules for combinations that make sense, and cases as text."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

from allpairspy import AllPairs

from combinations.refusals import REFUSED, compiled, refusals

AXES = {
    "model": (
        "mlp",
        "conv",
        "lstm",
        "attention",
        "two",
        "keras",
        "keras_subclass",
        "keras_own",
        "keras_train",
        "keras_plain",
    ),
    "data": (
        "arrays",
        "tuple",
        "dataset",
        "dataset_log",
        "loader",
        "iterable",
        "generator",
        "files",
        "mapped",
        "cache",
        "batch_map",
        "fifo",
    ),
    "last": ("whole", "ragged"),
    "ranks": (1, 2, 3),
    "strategy": ("ddp", "fsdp", "staged", "parameter_server", "async", "local_sgd"),
    "precision": ("fp32", "bf16"),
    "accumulate": (1, 2),
    "validation": ("none", "arrays", "pipeline", "loader", "steps"),
    "resume": ("none", "between", "middle"),
    "callbacks": ("none", "plateau", "early", "checkpoint", "own"),
    "weights": ("none", "class", "sample"),
    "frozen": ("no", "body"),
    "kept": ("auto", "features", "tables"),
    "functions": ("named", "own"),
}


class Case(NamedTuple):
    """One combination: a value for each axis."""

    model: str
    data: str
    last: str
    ranks: int
    strategy: str
    precision: str
    accumulate: int
    validation: str
    resume: str
    callbacks: str
    weights: str
    frozen: str
    kept: str
    functions: str

    def __str__(self) -> str:
        return "-".join(map(str, self))

    @classmethod
    def parse(cls, text: str) -> Case:
        """Return the case of a name that `str` returned."""
        values = text.split("-")
        if len(values) != len(AXES):
            raise ValueError(f"a case has {len(AXES)} values, found {len(values)}: {text}")
        return cls(
            *(
                next(one for one in axis if str(one) == value)
                for axis, value in zip(AXES.values(), values, strict=True)
            )
        )

    @property
    def is_keras(self) -> bool:
        return self.model.startswith("keras")

    @property
    def is_compiled(self) -> bool:
        return compiled(self.model)

    @property
    def refused_by(self) -> list[str]:
        """Words of the refusals that the case may meet."""
        return refusals(self._asdict())


# Groups of axes that affect one another: all their values meet, and not only pairs.
TOGETHER = (
    ("model", "strategy", "precision"),
    ("strategy", "precision", "validation"),
    ("model", "resume", "callbacks"),
)

# Rules for combinations without a meaning. Refused combinations are in refusals.py.
MEANINGLESS = {
    "Keras itself runs an own train_step": lambda c: (
        c["model"] == "keras_train"
        and (c["accumulate"], c["precision"], c["resume"], c["kept"]) != (1, "fp32", "none", "auto")
    ),
    "Keras refuses class_weight with these data": lambda c: (
        compiled(c["model"])
        and c["weights"] == "class"
        and c["data"] in ("loader", "iterable", "generator")
    ),
    "Keras reads a tuple as several inputs": lambda c: (
        c["data"] == "tuple" and c["model"] == "keras_train"
    ),
    "one rank needs no strategy": lambda c: c["ranks"] == 1 and c["strategy"] != "ddp",
    "validation_steps is Keras'": lambda c: c["validation"] == "steps" and not compiled(c["model"]),
    "Keras uses its own metrics": lambda c: compiled(c["model"]) and c["functions"] == "own",
    "only frozen layers have features to keep": lambda c: (
        c["kept"] == "features" and c["frozen"] == "no"
    ),
    "only one model has tables": lambda c: c["kept"] == "tables" and c["model"] != "attention",
    "an own loss gets no weights": lambda c: c["functions"] == "own" and c["weights"] != "none",
    "class weights and own functions need one output": lambda c: (
        c["model"] == "two" and (c["weights"] == "class" or c["functions"] == "own")
    ),
    "a pipe cannot be read again": lambda c: c["data"] == "fifo" and c["resume"] != "none",
    "LibSVM has no weights": lambda c: c["data"] in ("files", "fifo") and c["weights"] == "sample",
    "the pipes of all ranks have the same length": lambda c: (
        c["data"] == "fifo" and c["ranks"] > 1 and c["last"] == "ragged"
    ),
}


def makes_sense(known: Mapping[str, Any]) -> bool:
    """Return whether no rule excludes these values of axes."""
    for rule in MEANINGLESS.values():
        with suppress(KeyError):  # an axis has no value yet
            if rule(known):
                return False
    return True


def is_to_train(known: Mapping[str, Any]) -> bool:
    """Return whether these values of axes make sense together and are not refused."""
    return makes_sense(known) and not refusals(known)


def cases(strength: int = 2) -> Iterator[Case]:
    """Yield cases in which all values of each `strength` axes meet, and two for each refusal."""
    parameters = [list(axis) for axis in AXES.values()]
    groups = [*combinations(AXES, strength), *TOGETHER]
    covered = set()
    # AllPairs ends at its first case without a new pair, and may miss later pairs.
    for values in AllPairs(
        parameters, filter_func=lambda v: is_to_train(dict(zip(AXES, v, strict=False))), n=strength
    ):
        covered |= met(values, groups)
        yield Case(*values)
    draw = random.Random(0)
    for names in groups:
        for values in product(*(AXES[name] for name in names)):
            wanted = tuple(zip(names, values, strict=True))
            if wanted in covered:
                continue
            found = [case for _ in range(8) if (case := completed(dict(wanted), draw))]
            if found:
                best = max(found, key=lambda case: len(met(case, groups) - covered))
                covered |= met(best, groups)
                yield best
    yield from refused(draw)


def listed() -> list[Case]:
    """Return all pairs that `bench/combinations.py --list` has written."""
    text = Path(__file__).with_name("pairs.txt").read_text()
    return [Case.parse(line) for line in text.split()]


def met(case: Sequence[Any], groups: Sequence[tuple[str, ...]]) -> set[tuple[Any, ...]]:
    """Return the values of a case for each group of axes."""
    values = dict(zip(AXES, case, strict=True))
    return {tuple((name, values[name]) for name in names) for names in groups}


def completed(known: dict[str, Any], draw: random.Random) -> Case | None:
    """Return a case with these values, or None if no case is found."""
    for _ in range(10 if is_to_train(known) else 0):
        case = dict(known)
        for name in draw.sample([*AXES], len(AXES)):
            fitting = [one for one in AXES[name] if is_to_train(case | {name: one})]
            if name not in case and fitting:
                case[name] = draw.choice(fitting)
        if len(case) == len(AXES):
            return Case(**case)
    return None


def refused(draw: random.Random) -> Iterator[Case]:
    """Yield two cases of each refusal."""
    left = dict.fromkeys(REFUSED, 2)
    while any(left.values()):
        case = Case(*map(draw.choice, AXES.values()))
        words = case.refused_by
        if makes_sense(case._asdict()) and len(words) == 1 and left[words[0]]:
            left[words[0]] -= 1
            yield case
