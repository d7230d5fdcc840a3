import os
import subprocess
import sys

import pytest

from flatout import __version__

MAIN = "from flatout.cli.main import main; main()"

HEAVY = ("torch", "numpy", "pydantic", "rich", "psutil", "sklearn")


def flatout(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("FLATOUT_")}
    return subprocess.run(
        [sys.executable, "-c", MAIN, *words],
        capture_output=True,
        text=True,
        env=clean | environment,
    )


def test_help_names_the_commands() -> None:
    done = flatout("--help")
    assert done.returncode == 0
    for command in ("demo", "run", "export", "devices"):
        assert f"  {command} " in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("command", ["demo", "run", "export", "devices"])
def test_each_command_has_help(command) -> None:
    done = flatout(command, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("Usage:")


def test_the_command_line_loads_nothing_heavy() -> None:
    look = f"import sys, flatout.cli.main\nprint([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_version() -> None:
    assert flatout("--version").stdout == f"flatout {__version__}\n"


@pytest.mark.parametrize("words", [["fly"], ["--fly"], ["devices", "--fly"], ["devices", "more"]])
def test_wrong_usage_exits_with_2_and_says_how(words) -> None:
    done = flatout(*words)
    assert done.returncode == 2
    assert "Usage:" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_error_for_people_has_no_traceback() -> None:
    done = flatout("run", "--nodes", "2", __file__)
    assert done.returncode == 1
    assert done.stderr == (
        "error: --nodes 2, but not which of them this is\n  do: pass --node-rank, from 0\n"
    )
    assert done.stdout == ""


def test_a_traceback_comes_on_demand() -> None:
    done = flatout("run", "--nodes", "2", __file__, FLATOUT_DEBUG="1")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "WorldError: --nodes 2" in done.stderr
