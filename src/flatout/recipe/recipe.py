"""The two types of Recipe: requested, with fields that may be `auto`, and resolved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from flatout.recipe.parity import ModelFacts, Parity
from flatout.recipe.refusal import FieldError, PlainData, as_toml
from flatout.recipe.sections import FIELDS, PLAIN, SECTIONS, of_change, phrase, split, value_words
from flatout.recipe.setting import Value
from flatout.recipe.settings import Compute, Input, Memory, Process, Save, Script, World

ASKED = "asked for"
DEFAULT = "default"
# First words of the reason of a value that replaces an unavailable one.
REPLACED = "instead of"


def _parity(value: Any) -> Any:
    return Parity.from_words(value) if isinstance(value, str) else value


Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class Choice(PlainData):
    """The value of a field of a resolved Recipe, and the reason for it.

    `ratio` is time before over time after, so above 1 is faster; `low` and `high` are its interval.
    `floor` is the difference of A against A, as a fraction. All four are None if nothing was
    measured.
    """

    title: ClassVar[str] = "choice"

    value: Value = Field(description="The concrete value.")
    reason: str = Field(description="Why it was chosen, for people.")
    parity: Annotated[
        Parity,
        BeforeValidator(_parity),
        Field(json_schema_extra={"allowed": ", ".join(parity.words for parity in Parity)}),
    ] = Field(description="What the change from plain PyTorch does to the result.")
    ratio: Number | None = Field(default=None, description="Time before over time after.")
    low: Number | None = Field(default=None, description="Lower end of the ratio's interval.")
    high: Number | None = Field(default=None, description="Upper end of the ratio's interval.")
    floor: Number | None = Field(default=None, description="Noise of A against A, as a fraction.")

    @property
    def ratio_words(self) -> str:
        """The ratio and its interval, as in `2.31x [2.26,2.37]`; empty if nothing was measured."""
        if self.ratio is None:
            return ""
        if self.low is None or self.high is None:
            return f"{self.ratio:.2f}x"
        return f"{self.ratio:.2f}x [{self.low:.2f},{self.high:.2f}]"


Choice.known = tuple(f"choice.{name}" for name in Choice.model_fields)


class _Sections(PlainData):
    known: ClassVar[tuple[str, ...]] = (*SECTIONS, *FIELDS)

    compute: Compute = Compute()
    memory: Memory = Memory()
    process: Process = Process()
    input: Input = Input()
    world: World = World()
    save: Save = Save()
    script: Script = Script()

    def get(self, field: str) -> Value:
        section, name = split(field)
        value: Value = getattr(getattr(self, section), name)
        return value

    def named(self) -> dict[str, Value]:
        return {
            f"{section}.{name}": getattr(getattr(self, section), name)
            for section in SECTIONS
            for name in SECTIONS[section].model_fields
            if name in getattr(self, section).model_fields_set
        }


class Recipe(_Sections):
    """Every setting that decides how fast a job runs, as requested: a field may be `auto`.

        Recipe(compute=Compute(precision="bf16"), memory={"micro_batch": 64})

    Raises:
        RecipeError: a section or field is unknown, or a field does not allow its value.
    """

    def __repr__(self) -> str:
        asked = [f"{field}={value!r}" for field, value in self.named().items()]
        return f"Recipe({', '.join(asked)})"

    __str__ = __repr__

    def replace(self, changes: Mapping[str, Value]) -> Recipe:
        """Return a Recipe with some fields changed, by dotted name; they count as named.

        Raises:
            RecipeError: a field is unknown, or does not allow its value.
        """
        return of_fields({**self.named(), **changes})

    def resolve(
        self,
        choices: Mapping[str, Choice],
        machine: Mapping[str, Any],
        facts: ModelFacts = ModelFacts(),  # noqa: B008 (frozen)
    ) -> ResolvedRecipe:
        """Return the concrete Recipe: the choices, and otherwise the requested values.

        Args:
            choices: a Choice by dotted name, at least for each field that is `auto`.
            machine: the machine's fingerprint.
            facts: facts of the model, to judge the parity of requested values.

        Raises:
            RecipeError: a field is still `auto`, or a choice does not fit its field.
        """
        concrete = self.replace({field: choice.value for field, choice in choices.items()})
        asked = self.named()
        whole = {}
        for field in FIELDS:
            value = concrete.get(field)
            if field in choices:
                whole[field] = Choice(**{**dict(choices[field]), "value": value})
            else:
                reason = ASKED if field in asked else DEFAULT
                parity = of_change(field, PLAIN.get(field), value, facts)
                whole[field] = Choice(value=value, reason=reason, parity=parity)
        return ResolvedRecipe(**dict(concrete), choices=whole, machine=dict(machine))


def of_fields(fields: Mapping[str, Value]) -> Recipe:
    tables: dict[str, Any] = {}
    for field, value in fields.items():
        section, name = split(field)
        tables.setdefault(section, {})[name] = value
    return Recipe(**tables)


def _plain_machine(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain_machine(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_plain_machine(item) for item in value if item is not None]
    if isinstance(value, str | bool | int | float):
        return value
    raise FieldError(
        f"machine cannot hold {as_toml(value)}; allowed: text, numbers, true, false, lists, tables",
        path=("machine",),
    )


class Change(NamedTuple):
    """A row of the table of differences from plain PyTorch, in words."""

    field: str
    value: str
    reason: str
    parity: str
    ratio: str


class ResolvedRecipe(_Sections):
    """A concrete Recipe, with the reason for each value and the machine that it applies to.

    A Recipe that was proven for a script names only proven settings. The script's other settings
    are unknown, and stay as written there.
    """

    def __repr__(self) -> str:
        return f"ResolvedRecipe({self.summary()})"

    __str__ = __repr__

    choices: dict[str, Choice] = Field(
        description="A Choice for every field, by dotted name; or for each that was proven."
    )
    machine: Annotated[dict[str, Any], AfterValidator(_plain_machine)] = Field(
        description="The fingerprint of the machine that it was resolved on."
    )
    proven_for: str = Field(
        default="", description="The script and its arguments; empty for a Trainer or Loop."
    )

    @model_validator(mode="after")
    def _concrete_and_complete(self) -> ResolvedRecipe:
        for field in self.choices:
            split(field)
        for field in FIELDS:
            path, value = tuple(field.split(".")), self.get(field)
            if self.proven_for and field not in self.choices and field not in self.named():
                continue
            if value == "auto":
                raise FieldError(f"{field} is still auto; a resolved Recipe is concrete", path=path)
            if field not in self.choices:
                raise FieldError(f"choices has no entry for {field}", path=("choices",))
            if self.choices[field].value != value:
                raise FieldError(
                    f"{field} is {as_toml(value)}, but its choice says "
                    f"{as_toml(self.choices[field].value)}",
                    path=path,
                )
        return self

    def resolved(self) -> dict[str, Value]:
        """Return the chosen values, by dotted name, in the order of FIELDS."""
        return {field: self.get(field) for field in FIELDS if field in self.choices}

    def request(self) -> Recipe:
        """Return a Recipe that asks for exactly these values."""
        return of_fields(self.resolved())

    def for_other_machine(self) -> Recipe:
        """Return a Recipe for another machine, without measured values and this machine's CPUs."""
        plain = Recipe()
        return of_fields(
            {
                field: value
                for field, value in self.resolved().items()
                if plain.get(field) != "auto" and not field.startswith("process.")
            }
        )

    def on_this_machine(self, fingerprint: Mapping[str, Any]) -> tuple[bool, list[str]]:
        """Return whether a fingerprint is of this machine, and each difference in words."""
        there, here = dict(_leaves(self.machine)), dict(_leaves(_plain_machine(fingerprint)))
        differences = [
            f"{name}: {as_toml(there[name]) if name in there else 'absent'} where it was measured, "
            f"{as_toml(here[name]) if name in here else 'absent'} here"
            for name in {**there, **here}
            if name not in there or name not in here or there[name] != here[name]
        ]
        return not differences, differences

    def changes(self) -> list[Change]:
        """Return a row for each field that differs from plain PyTorch, in reading order."""
        rows = []
        for field in self.resolved():
            choice = self.choices[field]
            if self._differs(field):
                value = value_words(choice.value)
                rows.append(
                    Change(field, value, choice.reason, choice.parity.words, choice.ratio_words)
                )
        return rows

    def summary(self) -> str:
        """Return differences from plain PyTorch in one line: `bf16 · channels_last · rewrites`."""
        fields = dict.fromkeys(("world.device", *FIELDS))  # the device comes first
        phrases = [phrase(field, self.get(field)) for field in fields if self._differs(field)]
        return " · ".join(phrases) or "as plain PyTorch"

    def _differs(self, field: str) -> bool:
        if field not in self.choices:
            return False
        choice = self.choices[field]
        if self.proven_for or choice.reason.startswith(REPLACED):
            return True
        if field in PLAIN:
            return self.get(field) != PLAIN[field]
        # Plain PyTorch's thread counts depend on the machine: a choice of these counts is exact.
        return choice.parity > Parity.EXACT or choice.reason == ASKED


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{name}.{key}" if name else key)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{name}.{index}")
    else:
        yield name, value
