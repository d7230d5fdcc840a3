"""Loops that keep weights by a comparison of their own."""

import pytest

from flatout.observe import Call, Site
from flatout.observe.kept_best import kept_best

SAVES = {
    "smaller": ("if val_acc < best_acc:\n    best_acc = val_acc\n    torch.save(w, f)", "min"),
    "turned": ("if best_acc > val_acc:\n    best_acc = val_acc\n    torch.save(w, f)", "min"),
    "larger": ("if val_acc >= best:\n    torch.save(w, f)\n    best = val_acc", "max"),
    "assigned": ("if val < best:\n    best = val\n    kept = deepcopy(model)  # save(", "min"),
    "and": ("if late and val_acc < self.best:\n    self.best = val_acc\n    save(w)", "min"),
    "deeper": ("if acc < best:\n    best = acc\n    if rank == 0:\n        save(w)", "min"),
}
OTHERS = {
    "not replaced": "if val_acc < best_acc:\n    torch.save(w, f)",
    "not the best": "if val_acc < worst:\n    worst = val_acc\n    torch.save(w, f)",
    "else": "if val_acc < best:\n    best = val_acc\nelse:\n    torch.save(w, f)",
    "behind": "if val_acc < best:\n    best = val_acc\ntorch.save(w, f)",
    "two kinds": "if val_acc < best_loss:\n    best_loss = val_acc\n    torch.save(w, f)",
    "no kind": "if metric < best:\n    best = metric\n    torch.save(w, f)",
    "sign": "if -val_acc < best:\n    best = -val_acc\n    torch.save(w, f)",
    "equal": "if val_acc == best:\n    best = val_acc\n    torch.save(w, f)",
}


def found_in(folder, source, kind="save"):
    """What is found where the line with "save(" has run."""
    file = folder / "script.py"
    file.write_text(f"val = accuracy(model)\n{source}\n")
    line = next(at for at, text in enumerate(file.read_text().split("\n"), 1) if "save(" in text)
    return kept_best([Call(kind, Site(str(file), line), 1)])


@pytest.mark.parametrize("name", SAVES)
def test_what_is_compared_is_told_with_its_direction(tmp_path, name):
    source, mode = SAVES[name]
    (found,) = found_in(tmp_path, source, "deepcopy" if "deepcopy" in source else "save")
    assert (found.kind, found.acts, found.mode, found.metric_kind) == ("if", "keeps", mode, "score")
    assert found.site.line == 2


@pytest.mark.parametrize("name", OTHERS)
def test_nothing_is_told_of_other_lines(tmp_path, name):
    assert found_in(tmp_path, OTHERS[name]) == []


def test_only_lines_that_keep_weights_count(tmp_path):
    source, _ = SAVES["smaller"]
    assert found_in(tmp_path, source, "print") == []
    hardest = "if loss > best_loss:\n    best_loss = loss\n    kept = deepcopy(x)  # save("
    assert found_in(tmp_path, hardest, "deepcopy") == []
