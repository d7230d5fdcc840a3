"""Edit of loader workers: different random numbers in each."""

from __future__ import annotations

import ast

from flatout.doctor.edits.code import Unsure, inside, name_of
from flatout.doctor.edits.names import calls_of, is_imported
from flatout.doctor.edits.place import FoundAt
from flatout.doctor.finding import Edit


def seed_each(at: FoundAt) -> list[Edit]:
    """Change constant seeds in worker_init_fn to torch's seed, which differs in each worker."""
    code = at.code
    drawn = {loader.worker_draws for loader in at.seen.loaders if loader.worker_draws}
    if drawn - {"torch", "random", "numpy"}:
        raise Unsure("the generator is the dataset's own")
    named = [
        word.value.id
        for call in calls_of(code, "DataLoader")
        for word in call.keywords
        if word.arg == "worker_init_fn" and isinstance(word.value, ast.Name)
    ]
    functions = [n for n in code.tree.body if isinstance(n, ast.FunctionDef) and n.name in named]
    if len(set(named)) != 1 or len(functions) != 1 or not is_imported(code, "torch"):
        raise Unsure("what begins the workers cannot be seen")
    seeds = [
        node.args[0]
        for node in inside(functions[0].body)
        if isinstance(node, ast.Call)
        and name_of(node.func) in ("seed", "manual_seed")
        and len(node.args) == 1
        and isinstance(node.args[0], ast.Constant)
    ]
    if not seeds:
        raise Unsure("no seed is the same for all workers here")
    return [
        code.edit((code.begin(seed), code.end(seed), "torch.initial_seed() % 2**32"))
        for seed in seeds
    ]
