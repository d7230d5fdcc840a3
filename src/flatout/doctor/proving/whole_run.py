"""Steps and time of the user's whole run, derived from a first look and a trial."""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from flatout.doctor.judge import Verdict
from flatout.doctor.trials.arm import Block, Showed
from flatout.observe import Loader, Observation

_EPOCHS = ("--epochs", "--num-epochs", "--num_epochs", "--max-epochs", "--max_epochs")
_STEPS = ("--max-steps", "--max_steps")
# Minimum number of blocks with evaluation or saving. With fewer, a single block more or less
# changes the result much.
_FEWEST_BLOCKS = 4
# Minimum number of blocks with evaluation on each side to compare the duration of one evaluation
# between the sides.
_FEWEST_COMPARED = 2


def steps_at_all(verdict: Verdict) -> int | None:
    """Return the steps that the script took until its own end; None if it was stopped."""
    return verdict.steps if verdict.ended == "done" and verdict.steps else None


def epoch_steps(observation: Observation) -> int | None:
    """Return the steps of an epoch, if one loader of known length supplies all training batches."""
    loaders = [loader for loader in observation.loaders if loader.in_training and loader.batches]
    # A script may make a new loader for each epoch.
    if (
        not loaders
        or len({(loader.site, loader.length, loader.batch_size) for loader in loaders}) > 1
    ):
        return None
    batches = _batches(loaders[0], observation.world_size)
    if batches is None or not observation.optimizers:
        return None
    epochs, taken = (
        sum(loader.epochs for loader in loaders),
        sum(loader.batches for loader in loaders),
    )
    # A loop may break before the end of an epoch.
    if not (epochs - 1) * batches <= taken <= epochs * batches:
        return None
    backwards = max(1.0, max(optimizer.backwards for optimizer in observation.optimizers))
    if backwards % 1:
        return None
    return math.ceil(batches / backwards)


def evaluated_every(observation: Observation) -> int | None:
    """Return the steps between evaluations; None if unknown or not constant."""
    every = {model.evaluated_every for model in observation.models if model.evaluated_every}
    return every.pop() if len(every) == 1 else None


def _batches(loader: Loader, ranks: int) -> int | None:
    if not loader.length or not loader.batch_size:
        return None
    length = math.ceil(loader.length / ranks) if loader.is_distributed else loader.length
    whole = length // loader.batch_size
    return whole if loader.drop_last else math.ceil(length / loader.batch_size)


def run_steps(verdict: Verdict, what: Sequence[str]) -> int | None:
    """Return the steps of the whole run; None if unknown.

    They are known if the script has ended by itself, or if its command line has an option for
    epochs or steps. The option may also be missing if argparse gives it a default.
    """
    steps = steps_at_all(verdict) or _number_asked(what, _STEPS)
    if steps:
        return steps
    epochs, of_each = _number_asked(what, _EPOCHS), epoch_steps(verdict.observations[0])
    return epochs * of_each if epochs and of_each else None


def _number_asked(what: Sequence[str], names: Sequence[str]) -> int | None:
    for at, word in enumerate(what):
        name, equals, value = word.partition("=")
        if name in names:
            text = value if equals else "".join(what[at + 1 : at + 2])
            return int(text) if text.isdecimal() and int(text) else None
    script = next((Path(word) for word in what if word.endswith(".py")), None)
    return _default(script, names) if script is not None else None


def _default(script: Path, names: Sequence[str]) -> int | None:
    try:
        tree = ast.parse(script.read_bytes())
    except (OSError, ValueError, SyntaxError):
        return None
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or getattr(call.func, "attr", "") != "add_argument":
            continue
        if not any(isinstance(arg, ast.Constant) and arg.value in names for arg in call.args):
            continue
        for keyword in call.keywords:
            value = getattr(keyword.value, "value", None)
            if keyword.arg == "default" and type(value) is int and value > 0:
                return value
    return None


def setup_s(a: Showed, b: Showed, a_step: float, b_step: float) -> float:
    """Return the one-time seconds that only B takes, such as for compiling."""
    return max(0.0, _beyond(b, b_step) - _beyond(a, a_step))


def _beyond(side: Showed, step_s: float) -> float:
    return side.first_s + side.warm_s - (1 + side.warm_steps) * step_s


def between_s(blocks: Sequence[Block], looked_s: float) -> tuple[float, float]:
    """Return the seconds of evaluation and saving per step, of A and of B.

    The times of the trial are used if it has enough evaluations. A cure of the model shortens its
    evaluation too, and the first look may fall into a busy moment. Few evaluations only show the
    ratio of the durations on both sides, not how often evaluation occurs.
    """
    sides = [[block for block in blocks if block.side == side] for side in "ab"]
    a, b = ([block.between for block in side if block.between > 0] for side in sides)
    if min(len(a), len(b)) >= _FEWEST_BLOCKS:
        a_s, b_s = (mean(block.between / block.steps for block in side) / 1e9 for side in sides)
        return a_s, b_s
    if min(len(a), len(b)) < _FEWEST_COMPARED:
        return looked_s, looked_s
    # The shortest time of a side is the time of a single evaluation, with the least disturbance.
    return looked_s, looked_s * min(b) / min(a)


def whole_s(plain: Showed, side: Showed, steps: int, step_s: float, between_s: float) -> float:
    """Return the seconds of a run: start, setup, all steps, and the time between steps."""
    start = plain.started_s - plain.first_s
    return start + max(0.0, _beyond(side, step_s)) + steps * (step_s + between_s)
