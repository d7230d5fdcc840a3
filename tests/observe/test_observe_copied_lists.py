"""Lists that grow with each step are named where all of one is taken in each."""

from collections import deque
from types import SimpleNamespace

import pytest

from flatout.observe.copied_lists import CopiedLists

SCRIPT = """
def main(step, grown, last, kept):
    for epoch in range(2):
        for at in range(30):
            grown.append(at)
            last.append(at)
            kept["loss"].append(at)
            {line}
            step(at)
        {after}
"""


def told(folder, line, after="pass"):
    """What is told of a loop with this line."""
    at, looks = 0, {}

    def look(step, call):
        looks.setdefault(step, []).append(call)

    watch = SimpleNamespace(at=look, on_renewal=[], lanes=SimpleNamespace(steps=0))
    copied = CopiedLists(watch)

    def step(_):
        nonlocal at
        at += 1
        watch.lanes.steps = at
        [call() for call in looks.get(at, [])]  # the loop that steps is the script's

    file, names = folder / "script.py", {}
    file.write_text(SCRIPT.format(line=line, after=after))
    exec(compile(file.read_text(), str(file), "exec"), names)
    names["main"](step, deque(), deque(maxlen=100), {"loss": []})
    return [(item.words, item.site.line, item.more, item.is_list) for item in copied.histories]


@pytest.mark.parametrize(
    ("line", "words", "is_read"),
    [
        ("latest = list(grown)", "list(grown)", False),
        ("shown = kept['loss'][:]", "kept['loss'][:]", False),
        ("shown = kept['loss'].copy()", "kept['loss'].copy()", False),
        ("mean = sum(grown) / len(grown)", "sum(grown)", True),
    ],
)
def test_a_line_that_takes_all_of_a_list_is_told(tmp_path, line, words, is_read):
    assert told(tmp_path, line) == [(words, 8, 1, is_read)]


@pytest.mark.parametrize(
    "line",
    [
        "latest = list(last)",  # which does not grow for long
        "latest = grown[-1]",
        "if at % 10 == 0: shown = list(grown)",
        "shown = [list(grown) for _ in range(0)] if at > 90 else None",
        "lazy = lambda: list(grown)",
        "grown.clear(); shown = list(grown)",
    ],
)
def test_what_is_cheap_or_seldom_is_not_told(tmp_path, line):
    assert told(tmp_path, line) == []


def test_a_copy_after_each_epoch_is_not_told(tmp_path):
    assert told(tmp_path, "pass", after="shown = list(grown)") == []
