"""What `flatout report` gives of runs: text, plain data, a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import wrap
from typing import Any

from flatout.atomic_file import atomic_write, private
from flatout.errors import FlatoutError
from flatout.report.run import SeenRun
from flatout.report.run_comparison import Comparison, slower_limit
from flatout.report.run_page import dangers, facts, run_page, sentence

_WIDTH, _LABEL = 80, 13
_PAGE = "report.html"


class Report:
    """A report of one run, or of several against the first.

    Args:
        runs: their folders.

    Raises:
        FlatoutError: a folder is missing or no run's, or one run is named twice.
    """

    def __init__(self, runs: Sequence[str]) -> None:
        if len(runs) == 1:
            self.runs: Sequence[SeenRun] = [SeenRun.read(runs[0])]
            self.comparison = None
        else:
            self.comparison = Comparison.from_runs(runs)
            self.runs = self.comparison.runs

    def lines(self) -> list[str]:
        """The text, no wider than 80 columns where words allow."""
        if self.comparison is not None:
            return self.comparison.lines()
        (run,) = self.runs
        result = wrap(sentence(run), _WIDTH)
        for name, words in facts(run):
            indent = " " * (_LABEL + 2)
            result += wrap(f"  {name:{_LABEL - 1}} {words}", _WIDTH, subsequent_indent=indent)
        for line in dangers(run):
            result += wrap(f"DANGER {line}", _WIDTH, subsequent_indent="  ")
        return [*result, *run.problems]

    def as_dict(self) -> dict[str, Any]:
        """Plain data: of one run its state and Profile, of several their comparison."""
        if self.comparison is not None:
            return self.comparison.as_dict()
        (run,) = self.runs
        return {
            "run": str(run.path),
            "state": run.state,
            "dangers": dangers(run),
            "problems": run.problems,
            "profile": None if run.profile is None else asdict(run.profile),
        }

    def write(self, page: Path | None) -> Path | None:
        """Write the page; returns where it is, None where no one asked for one.

        Args:
            page: the file; None writes that of one run into its folder, and of several none.

        Raises:
            FlatoutError: it cannot be written.
        """
        if page is None:
            if self.comparison is not None:
                return None
            page = self.runs[0].path / _PAGE
        text = run_page(self.runs, self.comparison)
        try:
            # A file may have a name that UTF-8 cannot say.
            with atomic_write(page, "wb", opener=private) as file:
                file.write(text.encode(errors="replace"))
        except OSError as error:
            raise FlatoutError(
                f"cannot write the page: {error.strerror}",
                where=str(page),
                do="name a file in a folder that can be written: --html FILE",
            ) from error
        return page

    def fails(self, limit: str) -> list[str]:
        """A line for each run beyond a limit such as "slower=5%".

        Raises:
            FlatoutError: it is no limit, there is one run, or speeds cannot be judged.
        """
        parsed = slower_limit(limit)
        if self.comparison is None:
            raise FlatoutError(
                "--fail-if compares runs, and one was named",
                do="name the run to compare with first",
            )
        return self.comparison.fails(parsed)
