"""Shows a verdict's cures as a diff of the user's code, and writes them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.text import Text

from flatout.doctor import (
    Edit,
    Finding,
    Prescription,
    Proof,
    Source,
    Verdict,
    by_file,
    diff,
    fix,
    folder_of,
    with_recipe,
)
from flatout.errors import FlatoutError
from flatout.recipe import Parity
from flatout.report.first_look import short
from flatout.terminal import Console
from flatout.words import counted

_COLORS = {"---": "bold", "+++": "bold", "@@ ": "cyan", "-": "red", "+": "green"}


@dataclass(frozen=True)
class Change:
    finding: Finding
    parity: Parity

    def __str__(self) -> str:
        return f"{short(self.finding.where)} {self.finding.name} ({self.parity.words})"


@dataclass
class Changes:
    """All changes that can be made together.

    Attributes:
        made: changes to make, in the order of the findings.
        left: changes that conflict with changes in `made`, each with the reason.
    """

    made: list[Change] = field(default_factory=list)
    left: list[tuple[Change, str]] = field(default_factory=list)

    @property
    def edits(self) -> list[Edit]:
        """Edits of all changes to make."""
        return [edit for change in self.made for edit in change.finding.edits]

    def add(self, change: Change) -> None:
        """Add a change if it does not conflict with an earlier change."""
        try:
            for file, some in by_file([*self.edits, *change.finding.edits]).items():
                Source.read(file).with_edits(some)
        except FlatoutError as error:
            self.left.append((change, error.what))
        else:
            self.made.append(change)


def changes_of(verdict: Verdict, prescription: Prescription | None = None) -> Changes:
    result = Changes()
    proofs = {
        name: proof for proof in (prescription or Prescription()).proofs for name in proof.names
    }
    for finding in verdict.findings:
        # A note with a cost is about a cost that is too small to fix.
        if finding.kind == "note" and finding.cost_ms is not None:
            continue
        change = _change(finding, verdict, proofs.get(finding.name))
        if change is not None:
            result.add(change)
    return result


def _change(finding: Finding, verdict: Verdict, proof: Proof | None) -> Change | None:
    parity = finding.parity
    if proof is not None and finding.kind == "slow":
        if proof.outcome == "left alone":
            return None
        parity = proof.parity or parity
        if proof.recipe:  # a trial may have found a better value
            finding = with_recipe(finding, proof.recipe, verdict.observations[:1])
    if not finding.edits:
        return None
    return Change(finding, Parity.from_words(parity) if parity else Parity.EXACT)


def show(changes: Changes, console: Console) -> None:
    if not changes.made:
        console.print("there is nothing to change in your code")
        return
    root = folder_of(changes.edits)
    text = diff(changes.edits, root)
    for change in changes.made:
        console.print(f"{change}: {change.finding.do}")
    if os.path.realpath(os.getcwd()) != str(root):
        console.print(f"the diff is to be applied in {root}")
    _report_left(changes.left, console)
    if sys.stdout.isatty():
        Console(highlight=False).print(_colored(text), soft_wrap=True)
        return
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape"))
    sys.stdout.buffer.flush()


def _colored(diff: str) -> Text:
    text = Text()
    for line in diff.encode("utf-8", "surrogateescape").decode(errors="replace").splitlines(True):
        style = next((style for start, style in _COLORS.items() if line.startswith(start)), "")
        text.append(line, style)
    return text


def write(changes: Changes, allow: Parity, console: Console) -> None:
    """Make the changes that save time, with a parity of at most `allow`, and report them.

    Changes of learning and changes for notes are never made.
    """
    made, left = [], list(changes.left)
    for change in changes.made:
        reason = _reason_against(change, allow)
        if reason:
            left.append((change, reason))
        else:
            made.append(change)
    if not made:
        console.print("nothing was changed in your code")
    else:
        fixed = fix([edit for change in made for edit in change.finding.edits])
        console.print(f"changed {counted(len(fixed.files), 'file')}:", style="bold")
        for change in made:
            console.print(f"  {change}")
        console.print(f"undo  {fixed.command}", soft_wrap=True)
    _report_left(left, console)


def _reason_against(change: Change, allow: Parity) -> str:
    if change.parity is Parity.LEARNING:
        return "it changes learning, so it is yours to decide"
    if change.finding.kind != "slow":
        return "it saves no time, so it is yours to decide"
    if change.parity > allow:
        return f"it needs your word: --allow {change.parity.name.lower()}"
    return ""


def _report_left(left: Sequence[tuple[Change, str]], console: Console) -> None:
    for change, reason in left:
        console.print(f"not made: {change}: {reason}")
