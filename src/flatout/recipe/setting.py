"""A setting: one field of the Recipe, declared with all that is known of it.

    precision: Literal["auto", "fp32", "bf16"] = setting(
        "auto", "The number format.", plain="fp32", parity=Parity.TOLERANT, words="{}"
    )

The Recipe, `auto`, the cures, the doctor and the reference go through these declarations, which
stand in `settings/`, a file for each section.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from flatout.recipe.parity import ModelFacts, Parity
from flatout.recipe.refusal import PlainData

Value = str | int | bool | None | tuple[int, ...]
"""What a field of a Recipe can hold."""


class Section(PlainData):
    """Base of the sections: no value is converted in silence, so `"4"` is no number."""

    model_config = ConfigDict(strict=True)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.title = cls.__name__.lower()


@dataclass(frozen=True)
class Trial:
    """How a trial finds out whether another value is faster.

    Args:
        value: to try, or what tells it of the job at hand.
        fits: whether it could matter for the job: one of doctor/search.py or train/auto.py.
        why: it may be faster, where `auto` tries it on the job's steps.
        by_size: its gain comes from large tensors (memory traffic, page faults), so `auto` has to
            measure it on the whole batch.
        others: numbers to try beside it, by the CPUs there are.
    """

    value: Any
    fits: Callable[[Any], bool]
    why: str = ""
    by_size: bool = True
    others: Callable[[int], list[int]] | None = None


@dataclass(frozen=True)
class Live:
    """How a Loop brings a live model, its optimizers and the process to a value.

    Args:
        apply: given the Switch of train/settings.py and the value; None where steps ask for it.
        now: the value that holds, given the Switch; None for the plain one.
        may_change: something else may change it meanwhile, so it is always applied.
        layer: of a change of the model's code, how high it lies above others; `apply` then puts
            it on and returns a list of what takes it off.
        switches: how often it may: "step", before any step; "seldom", for many steps; "once", not
            back and forth.
        in_passes: forward or backward depends on it.
        in_features: what frozen layers give depends on it, so features are kept for each value.
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
    """What is known of a field, beside its type, default and description.

    Args:
        plain: what a plain PyTorch script does; "auto" where that depends on the machine.
        parity: what a change of it does to the result, or what decides that by the model.
        words: how it is said where it is not plain, with {} for the value.
        learns: the value that changes what is learned, where others do not.
        trial: of another value than the plain one.
        live: how a live model is switched to it; None where that needs a new process or Loop.
        cure: how a script written without Flatout gets it: a function of torch and cures.Steps, or
            its name in the form of pkgutil.resolve_name; settings with the same one share it.
        around: what `cure` returns is put around the calls of the script's models, the lowest
            first; 0 for a cure of other things.
        cures_plain: a script may be written otherwise, so the plain value is a cure, too.
        unmeasured: what `auto` takes where nothing was measured, and why, given the Switch.
        written: what a script has, by its Observation; None where that was not seen.
        of_input: it concerns the input alone, and may redraw only what that draws.
        in_epochs: it takes hold once in an epoch, so trials are measured in whole epochs.
        fills: it pays from the second epoch on.
        between_steps: what it saves lies between steps.
    """

    plain: Value
    parity: Parity | Callable[[ModelFacts], Parity]
    words: str
    learns: Value = None
    trial: Trial | None = None
    live: Live | None = None
    cure: str | Callable[[Any, Any], Any] | None = None
    around: int = 0
    cures_plain: bool = False
    unmeasured: Callable[[Any], tuple[Value, str]] | None = None
    written: Callable[[Any], Value] = lambda seen: None
    of_input: bool = False
    in_epochs: bool = False
    fills: bool = False
    between_steps: bool = False


def setting(default: Value, description: str, **facts: Any) -> Any:
    """Declare a field of a section: what is not named is decided by `default`."""
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
