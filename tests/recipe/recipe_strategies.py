"""Hypothesis strategies for Recipes: any value of any field, any Recipe, any resolved one."""

from hypothesis import strategies as st

from flatout.recipe import FIELDS, PLAIN, SECTIONS, Choice, Parity, Recipe
from flatout.recipe.recipe import of_fields


def values_of(field):
    """Any value of a field but `auto`, by the schema of its section."""
    section, _, name = field.partition(".")
    return _values(SECTIONS[section].model_json_schema()["properties"][name])


def _values(schema):
    if "anyOf" in schema:
        return st.one_of(map(_values, schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        words = [word for word in schema.get("enum", [schema.get("const")]) if word != "auto"]
        return st.sampled_from(words) if words else st.nothing()
    if "pattern" in schema:
        assert schema["allowed"] == "cuda:N"
        return st.integers(0, 15).map("cuda:{}".format)
    match schema["type"]:
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case "integer":
            least = schema.get("minimum", schema.get("exclusiveMinimum", -1) + 1)
            return st.integers(least, 10_000)
        case "array":
            several = st.lists(_values(schema["items"]), min_size=schema["minItems"], unique=True)
            return several.map(lambda numbers: tuple(sorted(numbers)))
    raise AssertionError(schema)


CONCRETE = {field: values_of(field) for field in FIELDS}

TAKES_AUTO = [field for field in FIELDS if Recipe().get(field) == "auto"]

REQUESTED = {
    field: st.just("auto") | values if field in TAKES_AUTO else values
    for field, values in CONCRETE.items()
}

named_fields = st.fixed_dictionaries({}, optional=REQUESTED)
recipes = named_fields.map(of_fields)

# Surrogates are no UTF-8, so no TOML text can hold them.
texts = st.text(st.characters(codec="utf-8"), max_size=20)
numbers = st.floats(allow_nan=False, allow_infinity=False)
leaves = texts | st.booleans() | st.integers() | numbers
machines = st.dictionaries(
    texts,
    st.recursive(
        leaves | st.none(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
        max_leaves=8,
    ),
    max_size=5,
)


@st.composite
def resolved_recipes(draw):
    recipe = draw(recipes)
    choices = {}
    for field in FIELDS:
        if recipe.get(field) == "auto" or draw(st.booleans()):
            choices[field] = Choice(
                value=draw(CONCRETE[field]),
                reason=draw(texts),
                parity=draw(st.sampled_from(Parity)),
                ratio=draw(st.none() | numbers),
                low=draw(st.none() | numbers),
                high=draw(st.none() | numbers),
                floor=draw(st.none() | numbers),
            )
    return recipe.resolve(choices, draw(machines))


def plain_choices(**changed):
    """A Choice for each field that takes auto: what plain PyTorch does, but for `changed`."""
    values = {**PLAIN, "process.threads": 4, **changed}
    return {
        field: Choice(value=values[field], reason="measured", parity=Parity.EXACT)
        for field in TAKES_AUTO
    }
