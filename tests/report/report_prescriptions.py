"""Prescriptions made up for tests."""

from typing import Any

from flatout.doctor.finding import Edit
from flatout.doctor.prescription import Prescription, Proof
from flatout.measure.trial import TrialResult


def trial(ratio: float, spread: float = 0.02, floor: float = 0.009) -> TrialResult:
    """A step of 412 ms, and what it is with the cure."""
    low, high = ratio * (1 - spread), ratio * (1 + spread)
    return TrialResult(ratio, low, high, floor, 5, 0.412, 0.412 / ratio, 11.0)


WORKERS = Proof(
    names=("workers_zero",),
    words="workers 0 to 6",
    recipe={"input.workers": 6},
    outcome="prescribed",
    trial=trial(2.31),
    parity="redrawn",
    same_batches=True,
)
BF16 = Proof(
    names=("fp32_slow", "channels_first"),
    words="bf16, channels_last",
    recipe={"compute.precision": "bf16", "compute.memory_format": "channels_last"},
    outcome="prescribed",
    trial=trial(1.19),
    parity="rounding",
    loss="0.1% apart on average over 200 steps",
    same_batches=True,
)
ITEM = Proof(
    names=("item_each_step",),
    words="numbers read when they are used",
    outcome="left alone",
    reason="1.01x, noise",
    trial=trial(1.01),
    parity="bit-identical",
)
COMPILE = Proof(
    names=("compile",),
    words="torch.compile",
    outcome="left alone",
    reason="41 s of set-up repay after 4,600 steps; you run 1,950",
    trial=trial(1.08),
    setup_s=41.0,
    repays_after=4600,
)
DECODE = Proof(
    names=("decode",), words="DCT-scaled decode", outcome="needs your OK", parity="redrawn"
)
UNTRIED = Proof(names=("cache",), words="samples cached in memory", reason="no time was left")
CODE = Proof(
    names=("log_each_step",),
    words="log_each_step (train.py:88)",
    edits=(Edit("train.py", 88, "print(loss)", ""),),
    outcome="prescribed",
    trial=trial(1.3),
    parity="bit-identical",
)


def prescription(**other: Any) -> Prescription:
    """One with something in every part of it."""
    known: dict[str, Any] = {
        "proofs": [WORKERS, BF16, ITEM, COMPILE, DECODE, UNTRIED],
        "together": Proof(
            names=(*WORKERS.names, *BF16.names),
            words="workers 0 to 6, bf16, channels_last",
            recipe={**WORKERS.recipe, **BF16.recipe},
            outcome="prescribed",
            trial=trial(3.40),
            parity="redrawn",
        ),
        "floor": 0.009,
        "seconds": 124.0,
        "run_steps": 1950,
        "before_s": 803.0,
        "after_s": 241.0,
        "refused": [{"kind": "network", "what": "sends to example.org", "where": "save.py:9"}],
    }
    return Prescription(**{**known, **other})
