import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recipe_strategies import REQUESTED, TAKES_AUTO, plain_choices, recipes, resolved_recipes

from flatout.errors import RecipeError
from flatout.recipe import FIELDS, Recipe, apply, dump, effective, from_file, from_set


@pytest.fixture(autouse=True)
def _nothing_given(monkeypatch):
    monkeypatch.delenv("FLATOUT_RECIPE", raising=False)
    monkeypatch.delenv("FLATOUT_SET", raising=False)


def _written(value):
    """A value as a user writes it behind `--set field=`."""
    if value is None:
        return "off"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def test_code_may_give_the_path_of_a_recipe(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text("[save]\nevery = 7\n")
    assert effective(str(path)).save.every == effective(path).save.every == 7
    with pytest.raises(RecipeError, match=r"cannot read the Recipe: No such file(.|\n)*none\.toml"):
        effective("none.toml")
    with pytest.raises(RecipeError, match=r"found dict(.|\n)*flatout\.recipe\.load\(path\)"):
        effective({"save": {"every": 7}})


@given(st.data(), st.sampled_from(FIELDS))
def test_each_value_can_be_set(data, field):
    value = data.draw(REQUESTED[field])
    changed = apply(Recipe(), [f"{field}={_written(value)}"])
    assert changed.named() == {field: value}


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("compute.precision = bf16 ", "bf16"),
        ('compute.precision="bf16"', "bf16"),
        ("compute.deterministic=True", True),
        ("compute.compile=true", "on"),
        ("process.affinity=[0, 1]", (0, 1)),
        ("process.affinity=0,1", (0, 1)),
        ("process.affinity=3", (3,)),
        ("save.every=null", None),
        ("world.device=cuda:1", "cuda:1"),
    ],
)
def test_convenient_spellings(setting, value):
    field = setting.partition("=")[0].strip()
    assert apply(Recipe(), [setting]).named() == {field: value}


def test_the_last_setting_wins_and_the_rest_stays():
    recipe = Recipe(save={"every": 7})
    changed = apply(recipe, ["compute.precision=bf16", "compute.precision=fp16"])
    assert changed.named() == {"save.every": 7, "compute.precision": "fp16"}
    assert recipe.named() == {"save.every": 7}


@pytest.mark.parametrize(
    ("setting", "what", "do"),
    [
        ("compute.precision=bf17", 'compute.precision cannot be "bf17"', "did you mean bf16?"),
        ("compute.precison=bf16", "compute.precison is not", "did you mean compute.precision?"),
        ("threads=2", "threads is not a field", "did you mean process.threads?"),
        ("compute.precision", "a setting has no value", "write --set section.field=value"),
        ("=bf16", " is not a field", None),
        ("memory.micro_batch=1.5", "memory.micro_batch cannot be 1.5", None),
        ("memory.micro_batch=", 'memory.micro_batch cannot be ""', None),
        ("process.affinity=a,b", 'process.affinity cannot be "a,b"', None),
        ("process.threads=1\nx=2", 'process.threads cannot be "1\\nx=2"', None),
    ],
)
def test_a_bad_setting_is_named_as_given(setting, what, do):
    with pytest.raises(RecipeError) as error:
        apply(Recipe(), [setting])
    assert error.value.what.startswith(what)
    assert error.value.where == f"--set {setting}"
    assert error.value.do == do


def test_without_anything_all_is_auto(tmp_path, monkeypatch):
    # A file that merely lies in the folder is not picked up.
    dump(Recipe(compute={"precision": "bf16"}), tmp_path / "flatout.toml")
    monkeypatch.chdir(tmp_path)
    assert effective(None) == Recipe()
    assert effective().named() == {}
    assert from_file() is None
    assert from_set() == []


@settings(max_examples=50)
@given(recipes, recipes, recipes)
def test_set_over_code_over_file_over_auto(tmp_path_factory, by_set, code, file):
    path = tmp_path_factory.mktemp("recipe") / "flatout.toml"
    dump(file, path)
    settings_given = [f"{field}={_written(value)}" for field, value in by_set.named().items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLATOUT_RECIPE", str(path))
        patch.setenv("FLATOUT_SET", json.dumps(settings_given))
        assert from_file() == file
        assert from_set() == settings_given
        assert effective(code).named() == {**file.named(), **code.named(), **by_set.named()}


def test_a_default_named_in_code_still_wins(tmp_path, monkeypatch):
    dump(Recipe(compute={"precision": "bf16"}, save={"every": 9}), tmp_path / "r.toml")
    monkeypatch.setenv("FLATOUT_RECIPE", str(tmp_path / "r.toml"))
    code = Recipe(compute={"precision": "auto"}, save={"every": None})
    assert effective(code).named() == {"compute.precision": "auto", "save.every": None}


@settings(max_examples=20)
@given(resolved_recipes(), recipes)
def test_a_resolved_file_counts_with_all_its_values(tmp_path_factory, resolved, code):
    path = tmp_path_factory.mktemp("recipe") / "flatout.toml"
    dump(resolved, path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLATOUT_RECIPE", str(path))
        assert from_file() == resolved
        assert effective(None) == resolved.request()
        assert effective(code) == resolved.request().replace(code.named())
        assert effective(resolved) == resolved.request()


def test_the_file_can_be_replaced_by_who_looked_at_it(tmp_path, monkeypatch):
    elsewhere = Recipe(save={"every": 7}).resolve(plain_choices(), {"cpu": "other"})
    dump(elsewhere, tmp_path / "r.toml")
    monkeypatch.setenv("FLATOUT_RECIPE", str(tmp_path / "r.toml"))
    monkeypatch.setenv("FLATOUT_SET", '["compute.precision=bf16"]')
    file = from_file()
    assert not file.on_this_machine({"cpu": "mine"})[0]
    again = effective(None, file=file.for_other_machine())
    assert again.get("save.every") == 7
    assert again.get("compute.precision") == "bf16"
    assert all(again.get(f) == "auto" for f in TAKES_AUTO if f != "compute.precision")


def test_a_bad_file_is_an_error_even_where_code_says_otherwise(tmp_path, monkeypatch):
    (tmp_path / "r.toml").write_text('[compute]\nprecision = "bf17"\n')
    monkeypatch.setenv("FLATOUT_RECIPE", str(tmp_path / "r.toml"))
    with pytest.raises(RecipeError) as error:
        effective(Recipe(compute={"precision": "bf16"}))
    assert error.value.where == f"{tmp_path / 'r.toml'}:2"
    monkeypatch.setenv("FLATOUT_RECIPE", str(tmp_path / "absent.toml"))
    with pytest.raises(RecipeError, match="No such file"):
        effective()


@pytest.mark.parametrize("text", ["compute.precision=bf16", "{}", "[1]", '"a=b"'])
def test_a_broken_set_variable_is_named(monkeypatch, text):
    monkeypatch.setenv("FLATOUT_SET", text)
    with pytest.raises(RecipeError, match="FLATOUT_SET must be a JSON list of texts") as error:
        effective()
    assert text in error.value.what
