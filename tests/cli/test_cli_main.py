import os
import subprocess
import sys

import pytest

from flatout import __version__
from flatout.cache_folder import MARK

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


@pytest.mark.parametrize("closed", ["<&-", "2>&-", "<&- 2>&-"])
def test_streams_that_were_closed_lead_nowhere(closed, tmp_path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "sys.stderr.write('no one hears this')\n"
        "print(*(os.readlink(f'/proc/self/fd/{number}') for number in (0, 2)))\n"
    )
    begin = ["bash", "-c", f'exec "$@" {closed}', "bash", sys.executable, "-c", MAIN]
    done = subprocess.run([*begin, "run", str(script)], input="", capture_output=True)
    assert done.returncode == 0
    told = dict(zip("02", done.stdout.decode().split(), strict=True))
    shut = {"<&-": "0", "2>&-": "2"}
    assert {told[shut[one]] for one in closed.split()} == {"/dev/null"}


def test_nothing_is_asked_where_standard_input_was_closed(tmp_path) -> None:
    (tmp_path / "auto").mkdir()
    (tmp_path / "auto" / MARK).touch()
    (tmp_path / "auto" / "one").write_text("{}")
    begin = ["bash", "-c", 'exec "$@" <&-', "bash", sys.executable, "-c", MAIN]
    done = subprocess.run(
        [*begin, "clean"],
        capture_output=True,
        text=True,
        env=os.environ | {"FLATOUT_CACHE": str(tmp_path)},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "flatout clean --yes removes" in done.stdout
    assert (tmp_path / "auto" / "one").exists()
