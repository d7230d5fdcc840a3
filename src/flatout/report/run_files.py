"""Output of `flatout report`: text, plain data, a page."""

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
    """A report of one run, or of several compared with the first.

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
        """Return the text, no wider than 80 columns unless a word is longer."""
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
        """Return plain data: state and Profile of one run, or the comparison of several runs."""
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
        """Write the page; return its path, or None if no page was requested.

        Args:
            page: file to write. If None, the page of one run is written into its folder, and that
                of several runs is not written.

        Raises:
            FlatoutError: the page cannot be written.
        """
        if page is None:
            if self.comparison is not None:
                return None
            page = self.runs[0].path / _PAGE
        text = run_page(self.runs, self.comparison)
        try:
            # The text may contain a file name that UTF-8 cannot encode.
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
        """Return a line for each run beyond a limit such as "slower=5%".

        Raises:
            FlatoutError: the limit is invalid, there is one run, or speeds cannot be compared.
        """
        parsed = slower_limit(limit)
        if self.comparison is None:
            raise FlatoutError(
                "--fail-if compares runs, and one was named",
                do="name the run to compare with first",
            )
        return self.comparison.fails(parsed)
