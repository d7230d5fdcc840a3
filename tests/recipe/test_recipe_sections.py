import pickle
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recipe_strategies import REQUESTED

from flatout.errors import RecipeError
from flatout.recipe import (
    FIELDS,
    SECTIONS,
    Compute,
    Memory,
    Process,
    Recipe,
    Save,
    World,
)
from flatout.recipe.refusal import allowed
from flatout.recipe.sections import split


def test_every_field_is_described_and_has_a_strategy():
    assert set(REQUESTED) == set(FIELDS)
    for section in SECTIONS.values():
        for name, field in section.model_fields.items():
            assert len(field.description) > 15, name


def test_what_nothing_measures_is_not_auto():
    plain = Recipe().process
    assert (plain.interop_threads, plain.affinity) == ("default", "per_rank")
    assert plain.flush_denormals == "default"
    assert Process(flush_denormals=True).flush_denormals == "on"
    for name, takes in (
        ("interop_threads", "default or a whole number above 0"),
        ("affinity", "per_rank, off or a list of CPU numbers"),
        ("flush_denormals", "default, on, off"),
    ):
        with pytest.raises(RecipeError, match=f'process.{name} cannot be "auto"; .*: {takes}'):
            Process(**{name: "auto"})


@given(st.data(), st.sampled_from(FIELDS))
def test_each_value_is_taken_and_kept(data, field):
    value = data.draw(REQUESTED[field])
    section, name = split(field)
    kept = getattr(SECTIONS[section](**{name: value}), name)
    assert kept == value
    assert type(kept) is type(value)


BAD = [
    ("compute.precision", "bf17", "auto, fp32, bf16, fp16"),
    ("compute.precision", None, "auto, fp32, bf16, fp16"),
    ("compute.precision", 16, "auto, fp32, bf16, fp16"),
    ("compute.rewrites", "yes", "auto, on, off"),
    ("compute.deterministic", 1, "true, false"),
    ("compute.deterministic", "auto", "true, false"),
    ("memory.micro_batch", 0, "auto, whole or a whole number above 0"),
    ("memory.micro_batch", "64", "auto, whole or a whole number above 0"),
    ("memory.micro_batch", 2.0, "auto, whole or a whole number above 0"),
    ("memory.activation_checkpointing", "auto", "on, off"),
    ("process.threads", True, "auto or a whole number above 0"),
    ("process.threads", -1, "auto or a whole number above 0"),
    ("process.affinity", [], "per_rank, off or a list of CPU numbers"),
    ("process.affinity", [0, -1], "per_rank, off or a list of CPU numbers"),
    ("process.affinity", ["0"], "per_rank, off or a list of CPU numbers"),
    ("process.affinity", True, "per_rank, off or a list of CPU numbers"),
    ("input.workers", -1, "auto, thread or a whole number from 0"),
    ("world.device", "cuda:01", "auto, cpu, cuda or cuda:N"),
    ("world.device", "cuda:1\n", "auto, cpu, cuda or cuda:N"),
    ("world.device", 0, "auto, cpu, cuda or cuda:N"),
    ("save.every", 0, "off or a whole number above 0"),
    ("save.keep_last", None, "a whole number above 0"),
]


@pytest.mark.parametrize(("field", "value", "words"), BAD)
def test_bad_value_is_named_with_what_is_allowed(field, value, words):
    section, name = split(field)
    with pytest.raises(RecipeError) as alone:
        SECTIONS[section](**{name: value})
    with pytest.raises(RecipeError) as inside:
        Recipe(**{section: {name: value}})
    assert alone.value.what.startswith(f"{field} cannot be ")
    assert alone.value.what.endswith(f"; allowed: {words}")
    assert alone.value.where == "in code"
    assert str(inside.value) == str(alone.value)


def test_bad_value_is_shown_as_found():
    with pytest.raises(RecipeError, match=r'cannot be "bf17"') as error:
        Compute(precision="bf17")
    assert error.value.do == "did you mean bf16?"
    with pytest.raises(RecipeError) as error:
        Compute(precision="x" * 1000)
    assert len(error.value.what) < 200


@pytest.mark.parametrize(
    ("make", "found", "meant"),
    [
        (lambda: Compute(precison="bf16"), "compute.precison", "compute.precision"),
        (lambda: Compute(threads=2), "compute.threads", "process.threads"),
        (lambda: Recipe(comput={}), "comput", "compute"),
        (lambda: Recipe(precision="bf16"), "precision", "compute.precision"),
        (lambda: Recipe(memory={"microbatch": 2}), "memory.microbatch", "memory.micro_batch"),
        (lambda: Recipe().get("save.evry"), "save.evry", "save.every"),
        (lambda: Recipe().get("sav.every"), "sav.every", "save.every"),
        (lambda: Recipe().replace({"compute.self": 1}), "compute.self", None),
        (lambda: Recipe().get("compute"), "compute", None),
        (lambda: Recipe(self=1), "self", None),
    ],
)
def test_unknown_name_gets_the_closest(make, found, meant):
    with pytest.raises(RecipeError) as error:
        make()
    assert error.value.what.startswith(f"{found} is not a field of a Recipe; ")
    if meant:
        assert error.value.do == f"did you mean {meant}?"


def test_the_names_that_a_section_takes_are_listed():
    with pytest.raises(RecipeError, match="memory takes micro_batch, activation_checkpointing, al"):
        Memory(nothing=1)


@pytest.mark.parametrize("value", [5, None, "bf16", Memory()])
def test_a_section_must_be_a_section(value):
    with pytest.raises(RecipeError, match=r"compute cannot be .* allowed: a table of precision,"):
        Recipe(compute=value)


def test_convenient_spellings():
    assert Process(affinity={3, 1}).affinity == (1, 3)
    assert Process(affinity=[1, 0, 1]).affinity == (0, 1)
    assert Process(affinity=2).affinity == (2,)
    assert Compute(compile=True).compile == "on"
    assert Compute(compile=False, deterministic="on") == Compute(compile="off", deterministic=True)
    assert Save(every="off").every is None


def test_sections_are_frozen_and_hash_by_value():
    recipe = Recipe(world=World(device="cpu"))
    with pytest.raises(ValueError, match="frozen"):
        recipe.world.device = "cuda"
    with pytest.raises(ValueError, match="frozen"):
        recipe.world = World()
    assert hash(recipe) == hash(Recipe(world={"device": "cpu"}))


def test_errors_travel_between_processes():
    with pytest.raises(RecipeError) as error:
        Compute(precision="bf17")
    copy = pickle.loads(pickle.dumps(error.value))
    assert str(copy) == str(error.value)
    assert (copy.what, copy.where, copy.do) == (
        error.value.what,
        error.value.where,
        error.value.do,
    )


def test_allowed_words_exist_for_every_field():
    for field in FIELDS:
        section, name = split(field)
        assert allowed(SECTIONS[section], name)


def test_import_is_light():
    code = (
        "import sys, flatout.recipe\n"
        "heavy = {'torch', 'numpy', 'tomllib', 'tomli_w'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
