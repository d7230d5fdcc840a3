import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recipe_strategies import (
    CONCRETE,
    REQUESTED,
    TAKES_AUTO,
    machines,
    named_fields,
    plain_choices,
    recipes,
    resolved_recipes,
)

from flatout.errors import RecipeError
from flatout.recipe import (
    FIELDS,
    Choice,
    ModelFacts,
    Parity,
    Recipe,
    ResolvedRecipe,
    dumps,
    loads,
)
from flatout.recipe.recipe import of_fields


@given(named_fields)
def test_named_gives_back_what_was_named(fields):
    recipe = of_fields(fields)
    assert recipe.named() == fields
    assert all(recipe.get(field) == value for field, value in fields.items())


@given(recipes, st.data(), st.sampled_from(FIELDS))
def test_replace_changes_one_field_and_names_it(recipe, data, field):
    value = data.draw(REQUESTED[field])
    changed = recipe.replace({field: value})
    assert changed.named() == {**recipe.named(), field: value}
    assert {f: changed.get(f) for f in FIELDS if f != field} == {
        f: recipe.get(f) for f in FIELDS if f != field
    }


def test_replace_refuses_as_construction_does():
    with pytest.raises(RecipeError, match=r'compute\.precision cannot be "bf17"'):
        Recipe().replace({"compute.precision": "bf17"})


@settings(max_examples=25)
@given(recipes, resolved_recipes())
def test_recipes_survive_pickling(recipe, resolved):
    copy = pickle.loads(pickle.dumps(recipe))
    assert (copy, copy.named()) == (recipe, recipe.named())
    assert pickle.loads(pickle.dumps(resolved)) == resolved


def test_resolve_takes_choices_for_auto_and_keeps_the_rest():
    recipe = Recipe(save={"every": 7}, compute={"precision": "fp16"})
    choices = plain_choices()
    del choices["compute.precision"]
    choices["process.affinity"] = Choice(value=(3, 1, 1), reason="pinned", parity=Parity.EXACT)
    resolved = recipe.resolve(choices, {"cpu": "Xeon"})
    assert resolved.get("compute.precision") == "fp16"
    assert resolved.choices["compute.precision"].reason == "asked for"
    assert resolved.choices["compute.precision"].parity is Parity.TOLERANT
    assert resolved.choices["save.keep_last"].reason == "default"
    assert resolved.choices["save.keep_last"].parity is Parity.EXACT
    assert resolved.choices["process.affinity"].value == (1, 3) == resolved.get("process.affinity")
    assert resolved.machine == {"cpu": "Xeon"}
    assert not isinstance(resolved, Recipe)


def test_parity_of_what_was_asked_for_depends_on_the_model():
    recipe = Recipe(memory={"micro_batch": 8})
    choices = plain_choices()
    del choices["memory.micro_batch"]
    coupled = recipe.resolve(choices, {}, ModelFacts(batch_coupled=True))
    assert coupled.choices["memory.micro_batch"].parity is Parity.LEARNING


@given(st.sampled_from(TAKES_AUTO))
def test_resolve_names_the_field_that_stays_auto(field):
    choices = plain_choices()
    del choices[field]
    with pytest.raises(RecipeError, match=f"{field} is still auto"):
        Recipe().resolve(choices, {})


def test_resolve_refuses_a_choice_that_does_not_fit():
    bad = Choice(value="bf17", reason="measured", parity=Parity.TOLERANT)
    with pytest.raises(RecipeError, match=r'compute\.precision cannot be "bf17"'):
        Recipe().resolve({**plain_choices(), "compute.precision": bad}, {})
    with pytest.raises(RecipeError, match=r"did you mean compute\.precision"):
        Recipe().resolve({**plain_choices(), "compute.precison": bad}, {})


@settings(max_examples=25)
@given(resolved_recipes())
def test_resolved_is_concrete_and_every_value_has_its_choice(resolved):
    assert set(resolved.choices) == set(FIELDS)
    for field in FIELDS:
        assert resolved.get(field) != "auto"
        assert resolved.choices[field].value == resolved.get(field)


@settings(max_examples=25)
@given(resolved_recipes())
def test_request_asks_for_exactly_these_values(resolved):
    request = resolved.request()
    assert request.named() == {field: resolved.get(field) for field in FIELDS}
    again = request.resolve({}, resolved.machine)
    assert again.request() == request


@settings(max_examples=25)
@given(resolved_recipes())
def test_undecided_keeps_what_no_machine_decides(resolved):
    again = resolved.for_other_machine()
    assert all(again.get(field) == "auto" for field in TAKES_AUTO)
    assert again.process == Recipe().process  # CPUs, threads and denormals are of that machine
    kept = {f for f in FIELDS if f not in TAKES_AUTO and not f.startswith("process.")}
    assert again.named() == {field: resolved.get(field) for field in FIELDS if field in kept}


def test_direct_construction_must_be_whole():
    whole = Recipe().resolve(plain_choices(), {})
    parts = dict(whole)
    lacking = {f: c for f, c in whole.choices.items() if f != "save.every"}
    with pytest.raises(RecipeError, match=r"choices has no entry for save\.every"):
        ResolvedRecipe(**{**parts, "choices": lacking})
    other = {**whole.choices, "save.every": Choice(value=5, reason="x", parity=Parity.EXACT)}
    with pytest.raises(RecipeError, match=r"save\.every is None, but its choice says 5"):
        ResolvedRecipe(**{**parts, "choices": other})
    with pytest.raises(RecipeError, match="machine is missing"):
        ResolvedRecipe(**{k: v for k, v in parts.items() if k != "machine"})
    with pytest.raises(RecipeError, match=r"machine cannot hold <object"):
        ResolvedRecipe(**{**parts, "machine": {"cpu": object()}})


@given(machines)
def test_the_same_machine_has_no_differences(machine):
    resolved = Recipe().resolve(plain_choices(), machine)
    assert resolved.on_this_machine(machine) == (True, [])


def test_differences_of_machines_in_words():
    there = {"torch": "2.13.0", "cpus": 2, "gpus": [{"name": "L4"}], "flags": ["avx2", "amx"]}
    resolved = Recipe().resolve(plain_choices(), there)
    here = {"torch": "2.12.0", "cpus": 2, "gpus": [{"name": "H200"}], "flags": ["avx2"], "os": "x"}
    same, differences = resolved.on_this_machine(here)
    assert not same
    assert differences == [
        'torch: "2.13.0" where it was measured, "2.12.0" here',
        'gpus.0.name: "L4" where it was measured, "H200" here',
        'flags: ["avx2", "amx"] where it was measured, ["avx2"] here',
        'os: absent where it was measured, "x" here',
    ]


def test_an_absent_value_is_as_good_as_none():
    resolved = Recipe().resolve(plain_choices(), {"gpu": None, "cpus": (1, 2)})
    assert resolved.machine == {"cpus": [1, 2]}
    assert resolved.on_this_machine({"cpus": [1, 2], "driver": None}) == (True, [])


def test_summary_names_only_what_differs_from_plain_pytorch():
    nothing = Recipe().resolve(plain_choices(), {})
    assert nothing.summary() == "as plain PyTorch"
    assert nothing.changes() == []
    changed = plain_choices(
        **{
            "compute.precision": "bf16",
            "compute.memory_format": "channels_last",
            "compute.rewrites": "on",
            "compute.fused_optimizer": "on",
            "memory.allocator": "keep",
        }
    )
    changed["process.threads"] = Choice(value=2, reason="measured", parity=Parity.TOLERANT)
    assert Recipe().resolve(changed, {}).summary() == (
        "bf16 · channels_last · rewrites · fused optimizer · memory kept by the allocator"
        " · 2 threads"
    )


def test_summary_of_what_was_asked_for():
    asked = {"process.threads": 1, "process.interop_threads": 1, "save.every": 100}
    asked |= {"world.device": "cuda:1", "process.affinity": (0, 1), "save.asynchronous": False}
    choices = {field: c for field, c in plain_choices().items() if field not in asked}
    assert of_fields(asked).resolve(choices, {}).summary() == (
        "cuda:1 · 1 thread · 1 interop thread · CPUs [0, 1] · checkpoint every 100 steps"
        " · waits for each checkpoint"
    )


@given(st.data(), st.sampled_from(FIELDS))
def test_changes_and_summary_agree(data, field):
    value = data.draw(CONCRETE[field])
    choices = {f: c for f, c in plain_choices().items() if f != field}
    resolved = of_fields({field: value}).resolve(choices, {})
    rows = resolved.changes()
    assert [row.field for row in rows] in ([], [field])
    assert (resolved.summary() == "as plain PyTorch") == (rows == [])


def test_changes_are_rows_of_words():
    choices = plain_choices()
    choices["compute.precision"] = Choice(
        value="bf16",
        reason="2.31 times faster",
        parity=Parity.TOLERANT,
        ratio=2.312,
        low=2.2601,
        high=2.3699,
        floor=0.009,
    )
    recipe = Recipe(save={"every": 7})
    assert recipe.resolve(choices, {}).changes() == [
        ("compute.precision", "bf16", "2.31 times faster", "rounding", "2.31x [2.26,2.37]"),
        ("save.every", "7", "asked for", "bit-identical", ""),
    ]


def test_ratio_without_an_interval():
    assert Choice(value=1, reason="", parity=Parity.EXACT, ratio=1.5).ratio_words == "1.50x"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), "2x", True])
def test_a_choice_takes_only_real_numbers(bad):
    with pytest.raises(RecipeError, match=r"choice\.ratio cannot be"):
        Choice(value=1, reason="", parity=Parity.EXACT, ratio=bad)


def test_what_was_proven_for_a_script_names_nothing_else():
    choices = {
        "input.workers": Choice(value=2, reason="w", parity=Parity.REDRAWN, ratio=2.3),
        "script.zero_grad": Choice(value="set_to_none", reason="z", parity=Parity.EXACT),
    }
    fields = {"input": {"workers": 2}, "script": {"zero_grad": "set_to_none"}}
    proven = ResolvedRecipe(**fields, choices=choices, machine={"cpu": "a"}, proven_for="a.py 1")
    assert proven.request().named() == {"input.workers": 2, "script.zero_grad": "set_to_none"}
    assert proven.for_other_machine().named() == {"script.zero_grad": "set_to_none"}
    assert [row.field for row in proven.changes()] == ["input.workers", "script.zero_grad"]
    assert proven.summary() == "workers=2 · gradients set to None"
    assert loads(dumps(proven)) == proven
    with pytest.raises(RecipeError, match=r"choices has no entry for input\.workers"):
        ResolvedRecipe(**fields, choices={}, machine={}, proven_for="a.py")
    with pytest.raises(RecipeError, match="is still auto"):
        ResolvedRecipe(
            choices={"input.workers": choices["input.workers"]}, machine={}, proven_for="a.py"
        )
