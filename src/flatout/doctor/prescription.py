"""What was proven of a script's cures: the outcome of trials, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from flatout.doctor.finding import Edit
from flatout.measure import TrialResult

Outcome = Literal["prescribed", "left alone", "needs your OK", "not tried"]


@dataclass(frozen=True)
class Proof:
    """One cure, or several together, tried against the script as it is.

    Attributes:
        names: of the findings that it cures.
        words: the cure in a few words, such as "workers 0 to 6".
        recipe: changes of a Recipe, by dotted name.
        edits: changes of the user's code.
        outcome: what follows.
        reason: why, where it is not prescribed; with when it would pay.
        trial: time as it is over time with the cure; None where it was not tried.
        parity: of the four words.
        loss: how the losses of the same steps differ, in words; "" where there are none.
        same_batches: whether both saw the same samples in the same order; None if unknown.
        setup_s: what the cure takes once, such as compiling.
        repays_after: steps after which that is made up for; None where it takes nothing, or never.
        held: what contained the trial: "overlay", "landlock" or "python".
        rests_on: what it was judged by: "wall time", or "CPU time" where the machine is too busy.
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
    """What came of all trials of one script.

    Attributes:
        proofs: each cure alone, in the order in which they were tried; also those not tried.
        together: all that is prescribed at once; None where nothing is.
        floor: how far from 1 a ratio of the script to itself may lie here.
        noise: what made the machine so noisy that small wins cannot be told from it; "" where it
            was calm enough.
        seconds: that the trials took.
        run_steps: steps of the user's whole run; None where it is not known.
        before_s, after_s: of the user's whole run, warm-up and setup included; None likewise.
        step_before_s, step_after_s: of a step, with its share of evaluation and saving; None where
            nothing is prescribed.
        refused: what the trials kept the script from doing: {"kind", "what", "where"}.
        stopped: why no trial was made, or no more; "" where all were.
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
        """Those that are worth it, alone."""
        return [proof for proof in self.proofs if proof.outcome == "prescribed"]

    @property
    def own_edits(self) -> tuple[Edit, ...]:
        """Changes of code among what is prescribed that no Recipe can say."""
        return tuple(edit for item in self.prescribed if not item.recipe for edit in item.edits)

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)
