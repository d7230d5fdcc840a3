"""Cures that a verdict's findings offer for trials."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flatout.doctor.finding import Edit, Finding
from flatout.doctor.judge import Verdict
from flatout.doctor.proposals import with_recipe
from flatout.observe import Observation
from flatout.recipe import SETTINGS, ModelFacts, Parity, Setting, of_change, phrase

COMPILE = "compute.compile"
_MOST_VALUES = 4


@dataclass(frozen=True)
class Cure:
    """A change of the script's settings or code; several cures together are one Cure too.

    Attributes:
        names: names of the findings that the cure is for.
        words: the cure in a few words, such as "workers 0 to 2".
        recipe: the cure as changes of a Recipe, by dotted name.
        edits: changes of the user's code; a trial makes them only if there is no Recipe.
        parity: the largest change of results that this kind of cure may cause.
        same_input: the largest change of results that is allowed if both sides are observed to read
            identical input.
        others: Cures that differ from this cure only in their values (such as another number of
            workers) and that are worth a trial.
        own_edits: the edits that a trial makes in addition to applying `recipe`.
    """

    names: tuple[str, ...]
    words: str
    recipe: Mapping[str, Any] = field(default_factory=dict)
    edits: tuple[Edit, ...] = ()
    parity: Parity = Parity.EXACT
    same_input: Parity = Parity.EXACT
    others: tuple[Cure, ...] = ()
    own_edits: tuple[Edit, ...] = ()

    @property
    def fields(self) -> frozenset[str]:
        """Names of the Recipe's fields."""
        return frozenset(self.recipe)

    @property
    def settings(self) -> list[Setting]:
        """Settings of the Recipe's fields."""
        return [SETTINGS[field] for field in self.recipe]

    @property
    def by_edits(self) -> Cure:
        """The same cure by edits of the code alone."""
        words = _edit_words(self.names, self.edits)
        return replace(self, words=words, recipe={}, others=(), own_edits=self.edits)


NOTHING = Cure((), "the script as it is")


def together(cures: Iterable[Cure]) -> Cure:
    """Return all cures as one."""
    joined = NOTHING
    for cure in cures:
        joined = Cure(
            names=(*joined.names, *cure.names),
            words=f"{joined.words}, {cure.words}" if joined.names else cure.words,
            recipe={**joined.recipe, **cure.recipe},
            edits=(*joined.edits, *cure.edits),
            parity=max(joined.parity, cure.parity),
            same_input=max(joined.same_input, cure.same_input),
            own_edits=(*joined.own_edits, *cure.own_edits),
        )
    return joined


def cures_of(verdict: Verdict, allow: Parity) -> list[Cure]:
    """Return the cures in the order of their trials.

    Cures that need the user's OK come after all other cures, and compiling, which takes longest,
    comes last. Otherwise the order is that of the findings: by the maximum time that each cure can
    save.
    """
    observation = verdict.observations[0]
    result: dict[Any, Cure] = {}
    for finding in verdict.findings:
        if finding.kind != "slow" or not (finding.recipe or finding.edits):
            continue
        cure = _cure(finding, observation)
        key = cure.fields or cure.edits
        result[key] = _joined(result[key], cure) if key in result else cure
    cures = [_with_values(cure, verdict) for cure in result.values()]
    return sorted(cures, key=lambda cure: (COMPILE in cure.recipe, cure.parity > allow))


def _cure(finding: Finding, observation: Observation) -> Cure:
    words = _edit_words((finding.name,), finding.edits)
    if finding.recipe:
        words = _recipe_words(finding.recipe, observation)
    parity = _parity(finding, observation)
    return Cure(
        names=(finding.name,),
        words=words,
        recipe=dict(finding.recipe),
        edits=finding.edits,
        parity=parity,
        same_input=_same_input(finding.recipe, parity, observation),
        own_edits=() if finding.recipe else finding.edits,
    )


def _joined(cure: Cure, other: Cure) -> Cure:
    more = () if other.recipe == cure.recipe else (other,)
    edits = tuple(dict.fromkeys((*cure.edits, *other.edits)))
    parity = max(cure.parity, other.parity)
    names = tuple(dict.fromkeys((*cure.names, *other.names)))
    same_input = max(cure.same_input, other.same_input)
    return replace(
        cure,
        names=names,
        edits=edits,
        parity=parity,
        same_input=same_input,
        others=(*cure.others, *more),
    )


def _parity(finding: Finding, observation: Observation) -> Parity:
    parity = Parity.from_words(finding.parity) if finding.parity else Parity.EXACT
    return max(parity, _of_recipe(finding.recipe, observation))


def _of_recipe(recipe: Mapping[str, Any], observation: Observation) -> Parity:
    facts = _facts(observation)
    return max((of_change(n, None, v, facts) for n, v in recipe.items()), default=Parity.EXACT)


def _same_input(recipe: Mapping[str, Any], parity: Parity, observation: Observation) -> Parity:
    rest = {name: value for name, value in recipe.items() if not SETTINGS[name].of_input}
    return parity if len(rest) == len(recipe) else _of_recipe(rest, observation)


def _facts(observation: Observation) -> ModelFacts:
    layers = {layer for model in observation.models for layer in model.layers}
    return ModelFacts(
        batch_coupled=any("BatchNorm" in layer for layer in layers),
        draws_random=any("Drop" in layer for layer in layers),
        device=observation.device.partition(":")[0],
        # Unknown before a trial. `same_input` applies later if both sides read identical input.
        draws_random_in_input=True,
    )


def _with_values(cure: Cure, verdict: Verdict) -> Cure:
    observation = verdict.observations[0]
    field_, *more = cure.recipe or [""]
    trial = SETTINGS[field_].trial if field_ and not more else None
    if trial is None or trial.others is None:
        return cure
    before, values = (
        SETTINGS[field_].written(observation),
        trial.others(observation.usable_cpus or 1),
    )
    tried = [cure.recipe[field_], *(other.recipe[field_] for other in cure.others)]
    values = [v for v in dict.fromkeys([*tried, *values]) if v != before][:_MOST_VALUES]
    tries: list[Cure] = []
    for value in values:
        plain = _changed(cure, {field_: value}, verdict)
        beside = _beside_threads(plain, verdict)
        if beside is not None:
            tries.append(beside)
        if beside is None or value == values[0]:
            tries.append(plain)
    return replace(tries[0], others=tuple(tries[1:_MOST_VALUES])) if tries else cure


def _beside_threads(cure: Cure, verdict: Verdict) -> Cure | None:
    observation = verdict.observations[0]
    workers, cpus = cure.recipe.get("input.workers"), observation.usable_cpus or 1
    threads = max(1, cpus - (workers or 0))
    if workers is None or observation.device != "cpu" or (observation.threads or 0) <= threads:
        return None
    return _changed(cure, {**cure.recipe, "process.threads": threads}, verdict)


def _changed(cure: Cure, change: Mapping[str, Any], verdict: Verdict) -> Cure:
    observation = verdict.observations[0]
    parity = max(cure.parity, _of_recipe(change, observation))
    return replace(
        cure,
        recipe=dict(change),
        words=_recipe_words(change, observation),
        parity=parity,
        same_input=_same_input(change, parity, observation),
        edits=tuple(
            dict.fromkeys(
                edit
                for finding in verdict.findings
                if finding.name in cure.names and finding.edits
                for edit in with_recipe(finding, change, verdict.observations).edits
            )
        ),
        others=(),
    )


def _recipe_words(recipe: Mapping[str, Any], observation: Observation) -> str:
    return ", ".join(_field_words(name, value, observation) for name, value in recipe.items())


def _field_words(name: str, value: Any, observation: Observation) -> str:
    before = SETTINGS[name].written(observation)
    if before is not None:
        return f"{name.partition('.')[2]} {before} to {value}"
    return phrase(name, value)


def _edit_words(names: Sequence[str], edits: Sequence[Edit]) -> str:
    lines = ", ".join(f"{Path(edit.file).name}:{edit.line}" for edit in edits[:2])
    return f"{', '.join(names)} ({lines})"
