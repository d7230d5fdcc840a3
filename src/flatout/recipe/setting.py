"""A setting: the declaration of one field of the Recipe, with all facts about it.

    precision: Literal["auto", "fp32", "bf16"] = setting(
        "auto", "The number format.", plain="fp32", parity=Parity.TOLERANT, words="{}"
    )

The Recipe, `auto`, the cures, the doctor and the reference documentation use these declarations.
They are in `settings/`, with a file for each section.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from flatout.recipe.parity import ModelFacts, Parity
from flatout.recipe.refusal import PlainData

Value = str | int | bool | None | tuple[int, ...]
"""Values that a field of a Recipe can have."""


class Section(PlainData):
    """Base class of the sections. Values are not converted silently: `"4"` is no number."""

    model_config = ConfigDict(strict=True)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.title = cls.__name__.lower()


@dataclass(frozen=True)
class Trial:
    """Terms of a trial that finds out whether another value is faster.

    Args:
        value: the value to try, or a function that derives it from the job.
        fits: returns True if the value could matter for the job: a job of doctor/search.py or
            train/tuning/auto.py.
        why: reason why the value may be faster, for the trials of `auto` on the job's steps.
        by_size: the gain comes from large tensors (memory traffic, page faults), so `auto` has to
            measure it on the whole batch.
        others: returns further numbers to try, by the number of CPUs.
    """

    value: Any
    fits: Callable[[Any], bool]
    why: str = ""
    by_size: bool = True
    others: Callable[[int], list[int]] | None = None


@dataclass(frozen=True)
class Live:
    """Functions with which a Loop brings a live model, its optimizers and the process to a value.

    Args:
        apply: applies a value, given the Switch of train/settings.py and the value; None if steps
            read the value themselves.
        now: returns the current value, given the Switch; None for the plain value.
        may_change: other code may change the value meanwhile, so it is always applied.
        layer: for a change of the model's code, its position above other changes. `apply` then
            applies it and returns a list of functions that undo it.
        switches: how often the value may change: "step", before any step; "seldom", for many
            steps; "once", not back and forth.
        in_passes: forward or backward depends on the value.
        in_features: outputs of frozen layers depend on it, so features are kept per value.
        in_graph: a step that is captured as one graph may have another value than the plain one.
    """

    apply: Callable[[Any, Any], Any] | None = None
    now: Callable[[Any], Value] | None = None
    may_change: bool = False
    layer: int = 0
    switches: Literal["step", "seldom", "once"] = "step"
    in_passes: bool = True
    in_features: bool = False
    in_graph: bool = True


@dataclass(frozen=True)
class Setting:
    """Facts about a field, in addition to its type, default and description.

    Args:
        plain: value of a plain PyTorch script; "auto" if that depends on the machine.
        parity: effect of a change on the result, or a function that derives it from the model.
        words: words for a value that is not plain, with {} for the value.
        learns: the one value that changes what is learned, if the other values do not.
        trial: trial of a value other than the plain one.
        live: how a live model switches to a value; None if that needs a new process or Loop.
        unmeasured: returns the value of `auto` without measurement, and why, given the Switch.
        written: returns the script's own value from its Observation; None if unknown.
        of_input: it concerns the input alone, and may change only random numbers of the input.
        in_epochs: it acts once per epoch, so trials are measured in whole epochs.
        fills: it pays from the second epoch on.
        between_steps: it saves time between steps.
    """

    plain: Value
    parity: Parity | Callable[[ModelFacts], Parity]
    words: str
    learns: Value = None
    trial: Trial | None = None
    live: Live | None = None
    unmeasured: Callable[[Any], tuple[Value, str]] | None = None
    written: Callable[[Any], Value] = lambda seen: None
    of_input: bool = False
    in_epochs: bool = False
    fills: bool = False
    between_steps: bool = False


def setting(default: Value, description: str, **facts: Any) -> Any:
    """Declare a field of a section; facts that are not given follow from `default`."""
    field: Any = Field(default=default, description=description)
    field.metadata.append(Setting(**{"plain": default, **facts}))
    return field


def switch_word(value: Any) -> Any:
    return ("on" if value else "off") if isinstance(value, bool) else value


def _truth(value: Any) -> Any:
    return {"on": True, "off": False}.get(value, value) if isinstance(value, str) else value


def _off_is_none(value: Any) -> Any:
    return None if isinstance(value, str) and value == "off" else value


Switch = Annotated[Literal["auto", "on", "off"], BeforeValidator(switch_word)]
OnOff = Annotated[Literal["on", "off"], BeforeValidator(switch_word)]
Flag = Annotated[bool, BeforeValidator(_truth)]
Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
Steps = Annotated[
    Positive | None,
    BeforeValidator(_off_is_none),
    Field(json_schema_extra={"allowed": "off or a whole number above 0"}),
]
