"""Results of the trials of a script's cures, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from flatout.doctor.finding import Edit
from flatout.measure import TrialResult

Outcome = Literal["prescribed", "left alone", "needs your OK", "not tried"]


@dataclass(frozen=True)
class Proof:
    """The result of trials of one cure, or of several together, against the unchanged script.

    Attributes:
        names: names of the findings that the cure is for.
        words: the cure in a few words, such as "workers 0 to 6".
        recipe: the cure as changes of a Recipe, by dotted name.
        edits: the cure as changes of the user's code.
        outcome: the verdict on the cure, such as "prescribed" or "left alone".
        reason: why the cure is not prescribed, and when it would pay.
        trial: ratio of the unchanged script's time to the time with the cure; None if not tried.
        parity: a value of Parity, such as "bit-identical" or "redrawn".
        loss: difference between the losses of the same steps, in words; "" if there are no losses.
        same_batches: True if the runs without and with the cure read the same samples in the same
            order; None if unknown.
        setup_s: one-time seconds that the cure takes, such as for compiling.
        repays_after: number of steps until the cure has saved `setup_s`; None if there is no setup,
            or the cure never saves as much.
        held: how the trial was contained: "overlay", "landlock" or "python".
        rests_on: the time that the cure was judged by: "wall time", or "CPU time" on a machine
            that is too busy for wall time.
    """

    names: tuple[str, ...]
    words: str
    recipe: dict[str, Any] = field(default_factory=dict)
    edits: tuple[Edit, ...] = ()
    outcome: Outcome = "not tried"
    reason: str = ""
    trial: TrialResult | None = None
    parity: str = ""
    loss: str = ""
    same_batches: bool | None = None
    setup_s: float = 0.0
    repays_after: int | None = None
    held: str = ""
    rests_on: Literal["wall time", "CPU time"] = "wall time"


@dataclass(frozen=True)
class Prescription:
    """Results of all trials of one script.

    Attributes:
        proofs: one Proof per cure, in the order of the trials, including cures that were not tried.
        together: proof of all prescribed cures together; None if none is prescribed.
        floor: largest distance from 1 that the ratio of the script to itself may have here.
        noise: cause of the noise that hides small wins, in words; "" if the machine was quiet
            enough.
        seconds: seconds that the trials took.
        run_steps: number of steps of the user's whole run; None if unknown.
        before_s, after_s: seconds of the user's whole run without and with the prescribed cures,
            including warm-up and setup; None if unknown.
        step_before_s, step_after_s: seconds of a step without and with the prescribed cures,
            including its part of evaluation and saving; None if nothing is prescribed.
        refused: actions that the trials did not allow the script: {"kind", "what", "where"}.
        stopped: reason why no trial was made, or why trials were stopped; "" if all trials were
            made.
    """

    proofs: list[Proof] = field(default_factory=list)
    together: Proof | None = None
    floor: float = 0.0
    noise: str = ""
    seconds: float = 0.0
    run_steps: int | None = None
    before_s: float | None = None
    after_s: float | None = None
    step_before_s: float | None = None
    step_after_s: float | None = None
    refused: list[dict[str, str]] = field(default_factory=list)
    stopped: str = ""

    @property
    def prescribed(self) -> list[Proof]:
        """Proofs of the cures that each pay alone."""
        return [proof for proof in self.proofs if proof.outcome == "prescribed"]

    @property
    def own_edits(self) -> tuple[Edit, ...]:
        """Edits of prescribed cures that a Recipe cannot express."""
        return tuple(edit for item in self.prescribed if not item.recipe for edit in item.edits)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)
