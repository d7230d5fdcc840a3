import os
import random
import re
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from recipe_strategies import plain_choices, recipes, resolved_recipes

from flatout.errors import RecipeError
from flatout.recipe import Choice, Parity, Recipe, ResolvedRecipe, dump, dumps, load, loads


@given(recipes)
def test_requested_round_trip(recipe):
    again = loads(dumps(recipe))
    assert type(again) is Recipe
    assert again == recipe
    assert again.named() == recipe.named()


@settings(max_examples=50)
@given(resolved_recipes())
def test_resolved_round_trip(resolved):
    again = loads(dumps(resolved))
    assert type(again) is ResolvedRecipe
    assert again == resolved
    assert dumps(again) == dumps(resolved)


def test_file_round_trip(tmp_path):
    path = tmp_path / "flatout.toml"
    recipe = Recipe(save={"every": None}, process={"affinity": [0, 1]})
    dump(recipe, path)
    assert load(path) == recipe
    resolved = Recipe().resolve(plain_choices(), {"cpu": "Xeon Größe"})
    dump(resolved, str(path))
    assert load(str(path)) == resolved
    assert os.listdir(tmp_path) == ["flatout.toml"]


def test_what_is_written_reads_well():
    choices = plain_choices()
    choices["compute.precision"] = Choice(
        value="bf16", reason="faster", parity=Parity.TOLERANT, ratio=2.31, low=2.26, high=2.37
    )
    text = dumps(Recipe().resolve(choices, {"torch": "2.13.0"}))
    assert 'every = "off"' in text
    assert '[machine]\ntorch = "2.13.0"\n' in text
    assert (
        '[choices."compute.precision"]\nreason = "faster"\nparity = "rounding"\n'
        "ratio = 2.31\nlow = 2.26\nhigh = 2.37\n\n"
    ) in text


def test_a_section_of_a_file_may_be_written_in_any_toml_way():
    recipe = Recipe(compute={"precision": "bf16"}, memory={"micro_batch": 8})
    for text in (
        '[compute]\nprecision = "bf16"\n[memory]\nmicro_batch = 8',
        'compute.precision = "bf16"\nmemory.micro_batch = 8',
        'compute = {precision = "bf16"}\nmemory = {micro_batch = 8}',
    ):
        assert loads(text) == recipe


WRONG = [
    ('\n[compute]\n# why\nprecision = "bf17"\n', 4, 'compute.precision cannot be "bf17"'),
    ('[memory]\nmicro_batch = 8\n[compute]\nprecison = "bf16"', 4, "compute.precison is not a"),
    ('[compute]\n[save]\nevery = 1\n\n[ comput ] # x\nprecision = "bf16"', 5, "comput is not a"),
    ('compute.precision = "bf17"', 1, 'compute.precision cannot be "bf17"'),
    ('\ncompute = { precision = "bf17" }', 2, 'compute.precision cannot be "bf17"'),
    ('["compute"]\n"precision" = 1', 2, "compute.precision cannot be 1"),
    ('precision = "bf16"', 1, "precision is not a field"),
    ("compute = 3", 1, "compute cannot be 3"),
    ("[[compute]]\nprecision = 1", 1, "compute cannot be "),
    ("[process]\naffinity = [\n  0,\n  -1,\n]", 2, "process.affinity cannot be [0, -1]"),
    ('save.every = 0\nnote = """\na b = 1\n"""\n', 1, "save.every cannot be 0"),
    ("a = 1\nb = \n", 2, "this is not TOML"),
    ("a = 1\na = 2\n", 2, "this is not TOML"),
    ("[compute\n", 1, "this is not TOML"),
]


@pytest.mark.parametrize(("text", "line", "what"), WRONG)
def test_an_error_names_the_file_and_the_line(tmp_path, text, line, what):
    path = tmp_path / "flatout.toml"
    path.write_text(text)
    with pytest.raises(RecipeError) as error:
        load(path)
    assert error.value.what.startswith(what)
    assert error.value.where == f"{path}:{line}"


def _resolved_text():
    return dumps(Recipe().resolve(plain_choices(), {"cpu": "Xeon"}))


HEADER = '[choices."process.threads"]'


@pytest.mark.parametrize(
    ("old", "new", "at", "what"),
    [
        (HEADER, '[choices."process.thread"]', '[choices."process.thread"]', "process.thread is"),
        (f'{HEADER}\nreason = "measured"', f"{HEADER}\nreason = 1", "reason = 1", "choice.reason"),
        (f'{HEADER}\nreason = "measured"', HEADER, HEADER, "choice.reason is missing"),
        (f"{HEADER}\n", f"{HEADER}\nratoi = 2\n", "ratoi = 2", "choice.ratoi is not a field"),
        (f"{HEADER}\n", f'{HEADER}\nratio = "2x"\n', 'ratio = "2x"', 'choice.ratio cannot be "2x"'),
        (f"{HEADER}\n", f"{HEADER}\nvalue = 3\n", "threads = 4", "process.threads is 4, but"),
        ("threads = 4", 'threads = "auto"', 'threads = "auto"', "process.threads is still auto"),
        ('[machine]\ncpu = "Xeon"', "machine = 1", None, "machine cannot be 1"),
        ('cpu = "Xeon"', "day = 2026-01-01", "[machine]", "machine cannot hold datetime.date"),
    ],
)
def test_an_error_in_a_resolved_recipe_names_the_line(old, new, at, what):
    text = _resolved_text().replace(old, new, 1)
    if at is None:
        text = f"{new}\n{text.replace(new, '')}"
        at = new
    line = text[: text.index(at)].count("\n") + 1
    with pytest.raises(RecipeError) as error:
        loads(text, source="r.toml")
    assert error.value.what.startswith(what)
    assert error.value.where == f"r.toml:{line}"


def test_a_setting_that_came_later_is_as_plain_pytorch():
    text = re.sub(
        r'\[choices\."world\.spare_workers"\]\n(.+\n)+|spare_workers = .+\n', "", _resolved_text()
    )
    assert "spare_workers" not in text
    recipe = loads(text)
    assert recipe.world.spare_workers == Recipe().world.spare_workers
    assert recipe.choices["world.spare_workers"].reason.startswith("not yet a setting")
    assert loads(dumps(recipe)) == recipe


def test_half_a_resolved_recipe_is_none():
    with pytest.raises(RecipeError, match="still auto"):
        loads("[machine]\n")
    text = _resolved_text()
    without_machine = text.replace('[machine]\ncpu = "Xeon"\n', "")
    with pytest.raises(RecipeError, match="machine is missing"):
        loads(without_machine)
    with pytest.raises(RecipeError, match=r"choices has no entry for compute\.precision"):
        loads(text[: text.index("[choices")])
    with pytest.raises(RecipeError, match="choices cannot be 3"):
        loads("choices = 3\n")
    with pytest.raises(RecipeError, match=r"process\.threads cannot be 3; allowed: a table with"):
        loads('[choices]\n"process.threads" = 3\n')


def test_a_redundant_value_that_agrees_is_taken():
    text = _resolved_text().replace(f"{HEADER}\n", f"{HEADER}\nvalue = 4\n")
    assert loads(text) == loads(_resolved_text())


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(RecipeError, match="No such file") as error:
        load(tmp_path / "absent.toml")
    assert error.value.where == str(tmp_path / "absent.toml")
    with pytest.raises(RecipeError, match="Is a directory"):
        load(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"# Gr\xf6\xdfe")
    with pytest.raises(RecipeError, match="UTF-8") as error:
        load(tmp_path / "latin.toml")
    assert error.value.where == f"{tmp_path / 'latin.toml'}: byte 4"


def test_unwritable_places_are_named(tmp_path):
    with pytest.raises(RecipeError, match="cannot write the Recipe: No such file"):
        dump(Recipe(), tmp_path / "absent" / "flatout.toml")
    (tmp_path / "file").touch()
    with pytest.raises(RecipeError, match="cannot write the Recipe: Not a directory"):
        dump(Recipe(), tmp_path / "file" / "flatout.toml")
    (tmp_path / "folder").mkdir()
    with pytest.raises(RecipeError, match="cannot write the Recipe: Is a directory"):
        dump(Recipe(), tmp_path / "folder")
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


def test_a_link_stays_a_link(tmp_path):
    link, target = tmp_path / "link.toml", tmp_path / "target.toml"
    link.symlink_to(target)
    dump(Recipe(compute={"precision": "bf16"}), link)
    assert link.is_symlink()
    assert load(target) == Recipe(compute={"precision": "bf16"})


def test_no_room_for_the_file_keeps_the_old_one(tmp_path):
    path = tmp_path / "flatout.toml"
    dump(Recipe(compute={"precision": "bf16"}), path)
    # The kernel refuses to let a file grow beyond the limit, as it does on a full disk.
    code = (
        "import resource, signal, sys\n"
        "from flatout.errors import RecipeError\n"
        "from flatout.recipe import Recipe, dump\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50, 50))\n"
        "try:\n"
        "    dump(Recipe(compute={'precision': 'fp32'}), sys.argv[1])\n"
        "except RecipeError as error:\n"
        "    print(error)\n"
    )
    command = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"cannot write the Recipe: File too large\n  {path}\n"
    assert load(path) == Recipe(compute={"precision": "bf16"})
    assert os.listdir(tmp_path) == ["flatout.toml"]


def test_a_kill_at_any_moment_leaves_a_whole_file(tmp_path):
    path = tmp_path / "flatout.toml"
    code = (
        "import sys\n"
        "from flatout.recipe import Recipe, dump\n"
        "pair = [Recipe(compute={'precision': p}) for p in ('fp32', 'bf16')]\n"
        "while True:\n"
        "    for recipe in pair:\n"
        "        dump(recipe, sys.argv[1])\n"
    )
    moments = random.Random(0)
    for _ in range(5):
        path.unlink(missing_ok=True)
        process = subprocess.Popen([sys.executable, "-c", code, str(path)])
        deadline = time.monotonic() + 60
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(moments.uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert load(path).get("compute.precision") in ("fp32", "bf16")


@pytest.mark.parametrize(
    "text",
    [
        "x = " + "[" * 5000 + "]" * 5000,
        "x = " + "{x = " * 5000 + "1" + "}" * 5000,
        ".".join("x" * 30_000) + " = 1",
        "[" + ".".join("x" * 30_000) + "]",
        ".".join(['"x"'] * 30_000) + " = 1",
    ],
    ids=range(5),
)
def test_text_that_is_nested_without_end_is_refused_at_once(text):
    with pytest.raises(RecipeError, match="not nested so deeply"):
        loads(text)
