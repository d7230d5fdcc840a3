"""What Flatout tells the user beside what the script prints."""

import os
import subprocess
import sys

import pytest

from flatout.say import rounded, say

buffered_or_not = pytest.mark.parametrize(
    "variables", [{}, {"PYTHONUNBUFFERED": "1"}], ids=["usual", "unbuffered"]
)


def ran(program, **variables):
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        [sys.executable, "-c", f"import os, sys\nfrom flatout.say import say\n{program}"],
        env={**env, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def test_lines_go_to_stderr_behind_what_was_written_there_before(capsys):
    print("before", file=sys.stderr)
    say("one", "two")
    assert capsys.readouterr() == ("", "before\nflatout: one\nflatout: two\n")


@buffered_or_not
def test_a_process_says_it_at_once(variables):
    program = "sys.stderr.write('begun, ')\nsay('naïve ☂')\nos._exit(0)"
    done = ran(program, **variables, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "begun, flatout: na\\xefve \\u2602\n"


@buffered_or_not
def test_a_stderr_that_was_closed_changes_no_exit_code(variables):
    for how in ("os.close(2)", "sys.stderr.close()", "sys.stderr = None"):
        done = ran(f"{how}\nsay('nobody hears this')", **variables)
        assert (done.returncode, done.stdout) == (0, ""), how


def test_numbers_are_rounded_as_people_write_them():
    written = {1190.4: "1,190", 130.0: "130", 1.194: "1.19", 0.01234: "0.0123", 1e-5: "1e-05"}
    assert {value: rounded(value) for value in written} == written
    assert [rounded(130, 2), rounded(12345.6, 6), rounded(2e9)] == [
        "130",
        "12,345.6",
        "2,000,000,000",
    ]
    assert [rounded(value) for value in (0, float("nan"), float("-inf"))] == ["0", "nan", "-inf"]
