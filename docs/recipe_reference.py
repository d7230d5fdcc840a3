"""Renders the Recipe reference from the code.

python docs/recipe_reference.py > docs/recipe.md
python docs/recipe_reference.py --check      # exit 1 when docs/recipe.md is out of date
"""

from __future__ import annotations

from pathlib import Path

from generated import print_or_check

from flatout.recipe import SECTIONS, SETTINGS, ModelFacts, Parity, Recipe, dumps, of_change
from flatout.recipe.refusal import allowed, as_toml

PAGE = Path(__file__).with_name("recipe.md")

HEAD = """\
# Recipe reference

<!-- Made from the code by docs/recipe_reference.py. The descriptions are in
     src/flatout/recipe/settings/. -->

A Recipe holds every setting that decides how fast a job runs. A field that says `auto` is decided
by measuring your model on your machine, or by the rule in its description. The rest is yours to
set, in three places. The first one that names a field decides it:

1. `flatout run --set compute.precision=bf16 train.py`
2. code: `Trainer(..., recipe=Recipe(compute=Compute(precision="bf16")))`
   or the path of a file: `Trainer(..., recipe="flatout.toml")`
3. a file: `flatout run --recipe flatout.toml train.py`

A file is never picked up unasked. It names only what you want to set:

```toml
{example}```

Unknown names and bad values are refused, with the line of the file.

## What a change does to the result

Each field below says what changing it does, in one of four wordings. `allow` is how far the
measuring may go; it is `tolerant` unless you say otherwise.

| wording | `allow` | meaning |
|---|---|---|
{parities}
"""

MEANINGS = {
    Parity.EXACT: "the same bits",
    Parity.TOLERANT: "the same optimization, rounded otherwise",
    Parity.REDRAWN: "the same distribution, other random draws",
    Parity.LEARNING: "something else is learned; never automatic",
}

NOTHING = ModelFacts(draws_by_layout=False)
DRAWS = ModelFacts(draws_random=True, draws_by_layout=False)

# What a model may be, and the simpler case that it is told apart from.
CASES = [
    ("if the model draws random numbers", DRAWS, NOTHING),
    (
        "if the model draws for each element of an image (Dropout on a convolution's output)",
        ModelFacts(draws_random=True, draws_by_layout=True),
        DRAWS,
    ),
    ("if samples are augmented at random", ModelFacts(draws_random_in_input=True), NOTHING),
    ("if the samples of a batch are coupled (BatchNorm)", ModelFacts(batch_coupled=True), NOTHING),
]


def page() -> str:
    """Return the whole reference as Markdown."""
    example = dumps(Recipe().replace({"compute.precision": "bf16", "save.every": 1000}))
    rows = [f"| {p.words} | `{p.name.lower()}` | {MEANINGS[p]} |" for p in Parity]
    parts = [HEAD.format(example=example, parities="\n".join(rows))]
    for title, section in SECTIONS.items():
        parts.append(f"## [{title}]\n\n{first_sentence(section.__doc__)}\n")
        parts += [field_text(f) for f in SETTINGS if f.startswith(f"{title}.")]
    return "\n".join(parts)


def first_sentence(text: str | None) -> str:
    """Return the first line of a docstring."""
    return (text or "").split("\n")[0]


def field_text(field: str) -> str:
    """Return one field's part: what it does, what it takes, its default and its parity."""
    title, _, name = field.partition(".")
    section = SECTIONS[title]
    lines = [
        f"### {field}\n\n{section.model_fields[name].description}\n",
        f"- takes: {allowed(section, name)}",
        f"- default: {words(Recipe().get(field))}",
    ]
    plain = SETTINGS[field].plain
    if plain != Recipe().get(field):
        lines.append(f"- plain PyTorch: {words(plain)}")
    lines.append(f"- when changed: {parity_words(field)}\n")
    return "\n".join(lines)


def words(value: object) -> str:
    """Return a value as TOML spells it, as code."""
    text = "off" if value is None else value if isinstance(value, str) else as_toml(value)
    return f"`{text}`"


def parity_words(field: str) -> str:
    """Return the parity of a change of the field, and what it becomes for models it depends on."""
    parts = [judged(field, NOTHING).words]
    for case, facts, simpler in CASES:
        if judged(field, facts) is not judged(field, simpler):
            parts.append(f"{judged(field, facts).words} {case}")
    if SETTINGS[field].learns is not None:
        parts.append(f"{Parity.LEARNING.words} to or from {words(SETTINGS[field].learns)}")
    return "; ".join(parts)


def judged(field: str, facts: ModelFacts) -> Parity:
    """Return the parity of a change between any two values of the field."""
    return of_change(field, "one value", "another", facts)


if __name__ == "__main__":
    raise SystemExit(print_or_check(PAGE, page()))
