"""The Recipe file that `flatout doctor` writes: settings proven for a script, on this machine."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from flatout.doctor import Prescription, Proof
from flatout.errors import FlatoutError
from flatout.masked import masked
from flatout.measure import fingerprint
from flatout.recipe import Choice, Parity, Recipe, ResolvedRecipe, Value, dump

DEFAULT = Path("flatout.toml")
COMMENT = "Written by flatout doctor, which may replace it: keep a Recipe of your own elsewhere."


def place(asked: Path | None, *, force: bool = False) -> Path:
    path = asked or DEFAULT
    check_target(path)
    if asked is None and not _is_free(path):
        path = path.with_name("flatout.doctor.toml")
    if not (force or _is_free(path)):
        raise FlatoutError(
            f"{path} is there already, and was not written by the doctor",
            do="name another with --recipe FILE, or replace it with --force",
        )
    return path


def check_target(path: Path) -> None:
    if not os.path.isdir(path.absolute().parent):
        raise FlatoutError(
            f"cannot write {path}: there is no such folder", do="make it, or name another"
        )
    try:
        path.lstat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise FlatoutError(f"cannot write {path}: {error.strerror}", do="name another") from error


def _is_free(path: Path) -> bool:
    if not os.path.exists(path):
        return True
    with path.open("rb") as file:
        return file.readline().decode(errors="replace").strip() == f"# {COMMENT}"


def write(path: Path, prescription: Prescription, what: Sequence[str]) -> bool:
    """Write the prescribed settings; return True if a Recipe can express any of them."""
    recipe = as_recipe(prescription, what)
    if recipe is not None:
        dump(recipe, path, comment=COMMENT)
    return recipe is not None


def as_recipe(prescription: Prescription, what: Sequence[str]) -> ResolvedRecipe | None:
    proofs = prescription.prescribed
    alone = {field: proof for proof in proofs for field in proof.recipe}
    together = prescription.together
    fields = dict(together.recipe) if together else {f: p.recipe[f] for f, p in alone.items()}
    if not fields:
        return None
    concrete = Recipe().replace(fields)
    choices = {
        field: _choice(concrete.get(field), alone.get(field) or together, prescription.floor)
        for field in fields
    }
    return ResolvedRecipe(
        **dict(concrete),
        choices=choices,
        machine=fingerprint().as_dict(),
        proven_for=shlex.join(masked(what)),
    )


def _choice(value: Value, proof: Proof | None, floor: float) -> Choice:
    assert proof is not None  # each field comes from one of the proofs
    trial = proof.trial
    parity = Parity.from_words(proof.parity) if proof.parity else Parity.EXACT
    if trial is None:
        return Choice(value=value, reason=proof.words, parity=parity)
    return Choice(
        value=value,
        reason=proof.words,
        parity=parity,
        ratio=trial.ratio,
        low=trial.low,
        high=trial.high,
        floor=max(trial.floor, floor),
    )
