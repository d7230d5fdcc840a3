"""The section `save`: when checkpoints are written."""

from typing import Literal

from flatout.recipe.parity import Parity
from flatout.recipe.setting import Flag, Positive, Section, Steps, setting


class Save(Section):
    """When checkpoints are written."""

    every: Steps = setting(
        None,
        "Steps between checkpoints. `off` (None in code) writes none on the way.",
        parity=Parity.EXACT,
        words="checkpoint every {} steps",
    )
    keep_last: Positive = setting(
        3,
        "How many of the newest checkpoints stay.",
        parity=Parity.EXACT,
        words="last {} checkpoints",
    )
    asynchronous: Flag = setting(
        True,
        "Write while training goes on; off waits for each checkpoint.",
        parity=Parity.EXACT,
        words="waits for each checkpoint",
        between_steps=True,
    )
    pieces: Literal["merged", "per_rank"] = setting(
        "merged",
        "With several ranks: the first writes each checkpoint, or every rank its part of it into "
        "the same folder, which all nodes must share.",
        parity=Parity.EXACT,
        words="checkpoints in pieces",
    )
