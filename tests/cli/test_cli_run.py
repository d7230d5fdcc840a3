import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys

import pytest
import torch

from flatout.devices import allocator
from flatout.measure.fingerprint import fingerprint
from flatout.recipe import FIELDS, PLAIN, Choice, Parity, Recipe, ResolvedRecipe, dump

MAIN = [sys.executable, "-c", "from flatout.cli.main import main; main()"]

TELL = """
import json, os, sys
names = ("FLATOUT_", "MALLOC_", "OMP_")
print(json.dumps({
    "argv": sys.argv,
    "path": sys.path[0],
    "pid": os.getpid(),
    "cpus": sorted(os.sched_getaffinity(0)),
    "environment": {k: v for k, v in os.environ.items() if k.startswith(names)},
}))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a script that tells how it was started, and a clean environment."""
    for name in list(os.environ):
        if name.startswith(("FLATOUT_", "MALLOC_", "OMP_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tell.py").write_text(TELL)
    return tmp_path


def run(*words: str, **more) -> subprocess.CompletedProcess:
    where = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
    return subprocess.run([*MAIN, "run", *words], text=True, **where)


def told(*words: str, **more) -> dict:
    done = run(*words, **more)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def exits(folder, code: int) -> int:
    (folder / "exit.py").write_text(f"import os, sys; sys.exit({code})")
    return run("exit.py").returncode


@pytest.mark.parametrize("code", [0, 1, 2, 130, 255])
def test_the_exit_code_passes_through(folder, code) -> None:
    assert exits(folder, code) == code


@pytest.mark.slow
@pytest.mark.long
def test_every_exit_code_passes_through(folder) -> None:
    assert [exits(folder, code) for code in range(256)] == list(range(256))


def test_arguments_pass_through_as_they_are(folder) -> None:
    words = ["a b", "", "--set", "x=1", "-m", "--help", "--", "--dry-run", "ü*$'\"\\"]
    assert told("tell.py", *words)["argv"] == ["tell.py", *words]
    assert told("--", "tell.py", *words)["argv"] == ["tell.py", *words]


def test_a_script_is_started_as_python_starts_it(folder) -> None:
    (folder / "sub").mkdir()
    (folder / "sub/tell.py").write_text(TELL)
    plain = subprocess.run(
        [sys.executable, "sub/tell.py", "x"], capture_output=True, text=True, check=True
    )
    ours, theirs = told("sub/tell.py", "x"), json.loads(plain.stdout)
    assert (ours["argv"], ours["path"]) == (theirs["argv"], theirs["path"])


def test_a_module_runs_with_its_arguments(folder) -> None:
    package = folder / "job"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(TELL)
    found = told("-m", "job", "--epochs", "5", "-m")
    assert found["argv"] == [str(package / "__main__.py"), "--epochs", "5", "-m"]
    assert told("--set", "process.threads=1", "-m", "--", "job", "--x")["argv"][1:] == ["--x"]


def test_a_module_that_is_not_there_gets_pythons_own_answer(folder) -> None:
    done = run("-m", "no_such_module")
    assert done.returncode == 1
    assert "No module named no_such_module" in done.stderr


def test_it_is_the_same_process(folder) -> None:
    process = subprocess.Popen([*MAIN, "run", "tell.py"], stdout=subprocess.PIPE)
    output, _ = process.communicate()
    assert json.loads(output)["pid"] == process.pid


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGKILL])
def test_a_signal_ends_the_script_as_it_would_without_us(folder, number) -> None:
    (folder / "wait.py").write_text("import time; print('ready', flush=True); time.sleep(60)")

    def ended(command: list[str]) -> int:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        try:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(number)
            return process.wait(timeout=120)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()

    ours = ended([*MAIN, "run", "wait.py"])
    assert ours == ended([sys.executable, "wait.py"]) == -number


def test_the_script_handles_a_signal_itself(folder) -> None:
    (folder / "handle.py").write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), sys.exit(143)))\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen([*MAIN, "run", "handle.py"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, output) == (143, "saved\n")


def test_standard_input_passes_through_to_the_last_byte(folder) -> None:
    (folder / "read.py").write_text(
        "import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())"
    )
    data = bytes(range(256)) * 4096
    done = subprocess.run([*MAIN, "run", "read.py"], input=data, capture_output=True, check=True)
    assert done.stdout.decode().strip() == hashlib.sha256(data).hexdigest()


def test_without_a_recipe_nothing_is_set_and_nothing_said(folder) -> None:
    done = run("tell.py")
    assert json.loads(done.stdout)["environment"] == {"FLATOUT_RUN": "1"}
    assert done.stderr == ""


def test_settings_are_there_before_python_starts(folder) -> None:
    cpu = max(os.sched_getaffinity(0))
    settings = ["memory.allocator=keep", "process.threads=2", f"process.affinity={cpu}"]
    done = run(*(word for setting in settings for word in ("--set", setting)), "tell.py", "x")
    found = json.loads(done.stdout)
    assert found["argv"] == ["tell.py", "x"]
    assert found["cpus"] == [cpu]
    assert found["environment"] == {
        "FLATOUT_RUN": "1",
        "FLATOUT_SET": json.dumps(settings),
        "OMP_NUM_THREADS": "2",
        **allocator.environment(),
    }
    if allocator.supported():
        assert (
            done.stderr == f"applied: allocator=keep threads=2 affinity={cpu}; undo: drop --set\n"
        )


@pytest.mark.slow
def test_threads_hold_where_the_script_sets_them_itself(folder) -> None:
    (folder / "many.py").write_text(
        "import torch\ntorch.set_num_threads(3)\nprint(torch.get_num_threads())\n"
    )
    assert run("many.py").stdout == "3\n"
    assert run("--set", "process.threads=2", "many.py").stdout == "2\n"


def test_a_recipe_is_named_by_its_whole_path_and_settings_go_before_it(folder) -> None:
    dump(Recipe(process={"threads": 1}, compute={"precision": "bf16"}), "mine.toml")
    done = run("--recipe", "mine.toml", "--set", "process.threads=3", "tell.py")
    found = json.loads(done.stdout)["environment"]
    assert found["FLATOUT_RECIPE"] == str(folder / "mine.toml")
    assert found["OMP_NUM_THREADS"] == "3"
    assert done.stderr == (
        "applied: threads=3; undo: drop --recipe and --set\n"
        "flatout: left as written: bf16 (the script imports no torch)\n"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="the setting can be applied on a GPU")
def test_a_cure_that_was_left_is_not_printed_as_applied(folder) -> None:
    (folder / "few.py").write_text("import torch\n")
    done = run("--set", "script.host_syncs=deferred", "--set", "script.garbage=scheduled", "few.py")
    left, applied = done.stderr.splitlines()[:2]
    assert left.startswith("flatout: left as written: host_syncs=deferred (there is no GPU")
    assert applied == "applied: garbage=scheduled; undo: drop --set"


def test_hooked_cures_are_printed_after_they_are_hooked(folder) -> None:
    (folder / "few.py").write_text("print('begun', flush=True)\nimport torch\nprint('there')\n")
    settings = ("--set", "script.garbage=scheduled", "--set", "memory.micro_batch=4")
    done = run(*settings, "few.py", stderr=subprocess.STDOUT)
    applied = "applied: garbage=scheduled; for a Trainer or Loop: micro_batch=4; undo: drop --set"
    assert done.stdout.splitlines()[:3] == ["begun", applied, "there"]
    early = run(*settings, "--set", "process.threads=2", "--dry-run", "few.py").stderr
    assert early.startswith("would be applied: threads=2 garbage=scheduled; for a Trainer or Loop")


def test_the_script_gets_the_recipe_that_was_shown(folder) -> None:
    (folder / "effective.py").write_text(
        "from flatout.recipe import Recipe, effective\n"
        "found = effective(Recipe(process={'threads': 5}, memory={'micro_batch': 8}))\n"
        "print(found.get('process.threads'), found.get('memory.micro_batch'))\n"
        "print(found.get('compute.precision'))\n"
    )
    dump(Recipe(process={"threads": 1}, compute={"precision": "bf16"}), "mine.toml")
    done = run("--recipe", "mine.toml", "--set", "memory.micro_batch=4", "effective.py")
    assert done.stdout == "5 4\nbf16\n"


def test_an_inherited_recipe_and_settings_hold_and_are_told(folder) -> None:
    dump(Recipe(process={"threads": 1}), "mine.toml")
    inherited = {"FLATOUT_RECIPE": "mine.toml", "FLATOUT_SET": '["memory.micro_batch=4"]'}
    done = run("--set", "input.workers=2", "tell.py", env=os.environ | inherited)
    found = json.loads(done.stdout)["environment"]
    assert json.loads(found["FLATOUT_SET"]) == ["memory.micro_batch=4", "input.workers=2"]
    assert found["OMP_NUM_THREADS"] == "1"
    assert run("tell.py", env=os.environ | inherited).stderr.endswith("from the environment\n")


def resolved(threads: int, machine: dict, **more) -> ResolvedRecipe:
    values = {**PLAIN, "process.threads": threads}
    values |= {"memory.allocator": "keep", "save.keep_last": 7, **more}
    choices = {
        field: Choice(value=values[field], reason="measured", parity=Parity.EXACT)
        for field in FIELDS
    }
    return Recipe().resolve(choices, machine)


def test_a_recipe_resolved_here_is_applied(folder) -> None:
    dump(resolved(1, fingerprint().as_dict()), "here.toml")
    done = run("--recipe", "here.toml", "tell.py")
    assert json.loads(done.stdout)["environment"]["OMP_NUM_THREADS"] == "1"
    assert "another machine" not in done.stderr


def test_a_recipe_resolved_while_bound_to_some_cpus_is_of_this_machine(folder) -> None:
    cpu = max(os.sched_getaffinity(0))
    facts = {**fingerprint().as_dict(), "cpus": 1}
    dump(resolved(1, facts, **{"process.affinity": (cpu,)}), "bound.toml")
    (folder / "same.py").write_text(
        "import os\n"
        "from flatout.measure.fingerprint import fingerprint\n"
        "from flatout.recipe import from_file\n"
        "print(from_file().on_this_machine(fingerprint().as_dict()), os.sched_getaffinity(0))\n"
    )
    assert run("--recipe", "bound.toml", "same.py").stdout == f"(True, []) {{{cpu}}}\n"
    dump(resolved(1, {**facts, "cpu": "another"}, **{"process.affinity": (cpu,)}), "there.toml")
    done = run("--recipe", "there.toml", "same.py")
    assert "another machine" in done.stderr
    assert done.stdout.endswith(f"{os.sched_getaffinity(0)}\n")


def test_a_recipe_of_another_machine_is_not_applied_and_says_so(folder) -> None:
    dump(resolved(48, {**fingerprint().as_dict(), "cpus": 96}), "there.toml")
    done = run("--recipe", "there.toml", "tell.py")
    assert not {"OMP_NUM_THREADS", "MALLOC_TOP_PAD_"} & set(json.loads(done.stdout)["environment"])
    first, second = done.stderr.splitlines()
    assert "another machine" in first
    assert "cpus: 96" in first
    assert "keep_last=7" in second


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--set", "process.treads=2"], "process.threads"),
        (["--set", "process.threads=many"], "many"),
        (["--set", "process.threads"], "no value"),
        (["--recipe", "missing.toml"], "missing.toml"),
        (["--recipe", "tell.py"], "not TOML"),
        (["--set", "process.affinity=100000"], "cannot be bound"),
        (["--servers", "1", "--set", "world.servers=2"], "say unlike numbers"),
        (
            ["--servers", "1", "--set", "world.strategy=ddp"],
            "found --set world.strategy=ddp, which",
        ),
        (
            ["--devices", "2", "--set", "world.strategy=fsdp", "--set", "world.staleness=4"],
            "fsdp has none",
        ),
    ],
)
def test_a_bad_recipe_stops_before_the_script_starts(folder, words, says) -> None:
    (folder / "mark.py").write_text("open('started', 'w')")
    done = run(*words, "mark.py")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert not (folder / "started").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["missing.py"], "missing.py: no such script"),
        ([], "Missing argument"),
        (["-m"], "Missing argument"),
        (["--devices", "0", "tell.py"], "--devices"),
        (["--no-such", "tell.py"], "--no-such"),
        (["--servers", "0", "tell.py"], "--servers"),
        (["--servers", "1", "--devices", "auto", "tell.py"], "say --devices N"),
    ],
)
def test_wrong_usage_exits_with_2(folder, words, says) -> None:
    done = run(*words)
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stdout == ""


def test_more_devices_than_there_are_are_refused_in_words(folder) -> None:
    done = run("--devices", "999", "tell.py")
    assert done.returncode == 1
    assert "999 ranks were asked for, but this node has" in done.stderr
    assert run("--devices", "1", "tell.py").returncode == 0


@pytest.mark.skipif(shutil.which("taskset") is None, reason="no taskset to bind a command with")
def test_a_dry_run_starts_nothing_and_prints_what_does_the_same(folder) -> None:
    (folder / "mark.py").write_text(f"open('started', 'w')\n{TELL}")
    cpu = max(os.sched_getaffinity(0))
    settings = ["--set", "process.threads=1", "--set", f"process.affinity={cpu}"]
    dry = run("--dry-run", *settings, "mark.py", "a b", "--dry-run")
    assert dry.returncode == 0
    assert not (folder / "started").exists()
    words = shlex.split(dry.stdout)
    assert words[0] == "env"
    assert "OMP_NUM_THREADS=1" in words
    again = subprocess.run(dry.stdout, shell=True, capture_output=True, text=True, check=True)
    ours, theirs = json.loads(again.stdout), told(*settings, "mark.py", "a b", "--dry-run")
    ours.pop("pid"), theirs.pop("pid")
    assert ours == theirs


# -- Keras' backend --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("imports", "inherited", "expected"),
    [
        ("if False:\n    import keras, flatout\n", None, "torch"),
        ("if False:\n    from keras import layers\n    import torch.nn\n", None, "torch"),
        ("if False:\n    import keras, flatout\n", "jax", "jax"),
        ("if False:\n    import keras\n", None, "None"),
        ("if False:\n    import flatout\n", None, "None"),
        ("if False:\n    import keras, flatout\n# KERAS_BACKEND is ours to set\n", None, "None"),
    ],
)
def test_a_script_of_keras_and_torch_gets_kerass_torch_backend(
    tmp_path, imports, inherited, expected
):
    script = tmp_path / "train.py"
    script.write_text(
        imports + "import os\nname = 'KERAS' + '_BACKEND'\nprint(os.environ.get(name))\n"
    )
    env = {name: value for name, value in os.environ.items() if name != "KERAS_BACKEND"}
    if inherited is not None:
        env["KERAS_BACKEND"] = inherited
    done = subprocess.run(
        [*MAIN, "run", str(script)], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == expected


def test_a_module_of_keras_and_torch_gets_that_backend_too(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "train.py").write_text(
        "if False:\n    import keras, flatout\n"
        "import os\nprint(os.environ.get('KERAS' + '_BACKEND'))\n"
    )
    env = {name: value for name, value in os.environ.items() if name != "KERAS_BACKEND"}
    done = subprocess.run(
        [*MAIN, "run", "-m", "package.train"],
        cwd=tmp_path, env=env, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "torch"


def test_the_doctor_watches_such_a_script_on_that_backend_too(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys\nif False:\n    import keras, flatout\n"
        "sys.exit('it runs on ' + str(os.environ.get('KERAS' + '_BACKEND')))\n"
    )
    env = {name: value for name, value in os.environ.items() if name != "KERAS_BACKEND"}
    done = subprocess.run(
        [*MAIN, "doctor", "--no-trials", str(script)], env=env, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "it runs on torch" in done.stdout + done.stderr
