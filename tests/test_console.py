"""What Flatout tells the user beside what the script prints."""

import fcntl
import io
import os
import re
import struct
import subprocess
import sys
import termios

import pytest
from rich.live import Live
from rich.table import Table
from rich.text import Text

from flatout.console import colorless, first_line, folded, printable, say
from flatout.errors import FlatoutError
from flatout.terminal import Console
from flatout.words import rounded

buffered_or_not = pytest.mark.parametrize(
    "variables", [{}, {"PYTHONUNBUFFERED": "1"}], ids=["usual", "unbuffered"]
)


def ran(program, **variables):
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        [sys.executable, "-c", f"import os, sys\nfrom flatout.console import say\n{program}"],
        env={**env, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def test_lines_go_to_stderr_behind_what_was_written_there_before(capsys):
    print("before", file=sys.stderr)
    say("one", "two")
    assert capsys.readouterr() == ("", "before\nflatout: one\nflatout: two\n")


def test_colors_of_other_programs_are_left_out():
    assert colorless("\x1b[36m(pid=1)\x1b[0m \x1b[1;32mdone\x1b[m [1m") == "(pid=1) done [1m"


def test_lines_are_broken_between_words_where_a_terminal_is_narrow():
    said = f"error: {'a word ' * 12}{'x' * 50}\n  {'where ' * 9}it-is-not-cut-here"
    assert folded(said, io.StringIO()) == said
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    with os.fdopen(ours), os.fdopen(theirs, "w") as terminal:
        lines = folded(said, terminal).split("\n")
    assert " ".join(lines).split() == said.split()
    assert [one for one in lines if len(one) > 40] == [f"  {'x' * 50}"]
    assert lines[-1] == "    where where where it-is-not-cut-here"


def test_what_is_said_on_a_terminal_is_broken_between_words(monkeypatch):
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        say("features: kept behind features.23 (51.4 MB on disk)")
    with os.fdopen(ours, "rb", buffering=0) as read:
        shown = read.read(4096).decode().split("\r\n")
    assert shown[:2] == ["flatout: features: kept behind", "  features.23 (51.4 MB on disk)"]


@buffered_or_not
def test_a_process_says_it_at_once(variables):
    program = "sys.stderr.write('begun, ')\nsay('naïve ☂')\nos._exit(0)"
    done = ran(program, **variables, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "begun, flatout: na\\xefve \\u2602\n"


@buffered_or_not
def test_a_stderr_that_was_closed_changes_no_exit_code(variables):
    for how in ("os.close(2)", "sys.stderr.close()", "sys.stderr = None"):
        done = ran(f"{how}\nsay('no one hears this')", **variables)
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


RAW = "a\x1b[2J\x1b]0;owned\x07b\x9bc\x7fd\r\u202ee\u2069\tf\n"
SHOWN = "a␛[2J␛]0;owned␇b\ufffdc␡d␍\ufffde\ufffd\tf\n"


def test_what_a_terminal_would_obey_is_shown():
    assert printable(RAW) == SHOWN
    assert len(SHOWN) == len(RAW)
    assert printable("naïve ☂ 学") == "naïve ☂ 学"


def test_nothing_that_is_said_reaches_a_terminal_raw(capsys):
    say(f"the file {RAW}")
    assert "\x1b" not in str(FlatoutError(RAW, where=RAW, do=RAW))
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, markup=False)
    table = Table("column", RAW)
    table.add_row(Text(RAW, style="bold"), RAW)
    console.print(table, RAW, Text(RAW))
    with Live(Text(RAW), console=console):
        pass
    # Rich's own codes are left: styles, and moves of the cursor.
    for text in (capsys.readouterr().err, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())):
        assert "␛[2J␛]0;owned" in text
        assert not set("\x1b\x07\x9b\x7f\u202e\u2069") & set(text)


def test_names_that_no_text_can_hold_do_not_stop_a_report():
    for encoding, shown in (("utf-8", "run-?2J.py ü → 学"), ("ascii", "run-?2J.py ? ? ?")):
        # As Python opens stdout in the C locale, bytes of a name would go out as they are.
        for errors in ("strict", "surrogateescape"):
            raw = io.BytesIO()
            out = io.TextIOWrapper(raw, encoding=encoding, errors=errors)
            console = Console(file=out, width=80, markup=False)
            console.print(Text(os.fsdecode(b"run-\x9b2J.py") + " ü → 学"))
            out.flush()
            assert raw.getvalue().decode(encoding).rstrip() == shown


def test_an_error_that_says_nothing_is_named_by_its_type():
    assert first_line(AssertionError()) == "AssertionError"
    assert first_line(ValueError("\n one \ntwo")) == "one"
