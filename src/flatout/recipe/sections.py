"""The sections of a Recipe, and all settings in them by dotted name.

A field that measurement may decide can be `"auto"`, which is its default. Sections are frozen. An
unknown name, or a value that a field does not allow, raises RecipeError.
"""

from __future__ import annotations

from flatout.recipe.parity import ModelFacts, Parity
from flatout.recipe.refusal import as_toml, unknown
from flatout.recipe.setting import Section, Setting, Value
from flatout.recipe.settings import Compute, Input, Memory, Process, Save, Script, World

SECTIONS: dict[str, type[Section]] = {
    section.title: section for section in (Compute, Memory, Process, Input, World, Save, Script)
}

SETTINGS: dict[str, Setting] = {
    f"{title}.{name}": next(fact for fact in field.metadata if isinstance(fact, Setting))
    for title, section in SECTIONS.items()
    for name, field in section.model_fields.items()
}
"""Every setting by its field's dotted name, in reading order."""

FIELDS = tuple(SETTINGS)
"""Every field's dotted name, in reading order."""

Section.known = FIELDS

PLAIN = {field: setting.plain for field, setting in SETTINGS.items() if setting.plain != "auto"}
"""Values of a plain PyTorch script. Threads are missing, since they depend on the machine."""


def split(field: str) -> tuple[str, str]:
    section, dot, name = field.partition(".")
    if field in FIELDS:
        return section, name
    if dot and section in SECTIONS:
        raise unknown(field, FIELDS, f"{section} takes", SECTIONS[section].model_fields)
    raise unknown(field, FIELDS, "the sections are", SECTIONS)


def of_change(field: str, before: Value, after: Value, facts: ModelFacts) -> Parity:
    """Return the effect of changing one field on the result of training this model.

    Raises:
        RecipeError: no field has this name.
    """
    split(field)
    if before == after:
        return Parity.EXACT
    setting = SETTINGS[field]
    if setting.learns is not None and setting.learns in (before, after):
        return Parity.LEARNING
    return setting.parity if isinstance(setting.parity, Parity) else setting.parity(facts)


def value_words(value: Value) -> str:
    return value if isinstance(value, str) else "off" if value is None else as_toml(value)


def phrase(field: str, value: Value) -> str:
    """Return a setting with its value in words, such as `bf16` or `2 threads`."""
    setting, shown = SETTINGS[field], value_words(value)
    if "{}" not in setting.words and value in (setting.plain, "off", "default"):
        return f"{field}={shown}"
    words = setting.words.format(shown)
    return words.removesuffix("s") if shown == "1" else words
