"""The files that a user requests of a verdict: page, trace, baseline."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from flatout.atomic_file import atomic_write, private
from flatout.doctor import Prescription, Verdict, Verified
from flatout.errors import FlatoutError
from flatout.measure import fingerprint
from flatout.report.baseline import Baseline, Compared, compare
from flatout.report.chrome_trace import trace
from flatout.report.page import page
from flatout.report.recipe_file import check_target


@dataclass(frozen=True)
class Files:
    """Paths of the files, and the baseline to compare with; None for a file not requested.

    Raises:
        FlatoutError: the folder of a file does not exist; raised before any script runs.
    """

    page: Path | None = None
    trace: Path | None = None
    ci: Baseline | None = None
    baseline: Path | None = None

    def __post_init__(self) -> None:
        for path in (self.page, self.trace, self.baseline):
            if path is not None:
                check_target(path)

    def write(
        self,
        verdict: Verdict,
        prescription: Prescription | None = None,
        verified: Verified | None = None,
    ) -> Compared | None:
        """Write the requested files; return the comparison of the verdict with the baseline.

        Args:
            verdict: verdict on the script as it is.
            prescription: proven cures; None if no cure was tried.
            verified: results of whole runs; None without whole runs.

        Raises:
            FlatoutError: a file cannot be written.
        """
        data = verdict.as_dict()
        data["prescription"] = prescription.as_dict() if prescription else None
        data["verified"] = verified.as_dict() if verified else None
        if self.page is not None:
            _write(self.page, page(data))
        if self.trace is not None:
            _write(self.trace, json.dumps(trace(data["observations"])))
        if self.baseline is not None:
            Baseline.from_verdict(data, fingerprint().as_dict()).write(self.baseline)
        return compare(self.ci, data, fingerprint().as_dict()) if self.ci is not None else None


def _write(path: Path, text: str) -> None:
    try:
        # The text may contain a file name that UTF-8 cannot encode.
        with atomic_write(path, "wb", opener=private) as file:
            file.write(text.encode(errors="replace"))
    except OSError as error:
        raise FlatoutError(f"cannot write {path}: {error.strerror}") from error
