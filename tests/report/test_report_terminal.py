"""Renderings are read back as the text that a user sees."""

import io
from dataclasses import replace

import pytest
from rich.console import Console, RenderableType

from flatout.recipe import Choice, Parity, Recipe, ResolvedRecipe, sections
from flatout.report import Changes, Comparison, JobResult, Lanes

BF16 = Choice(
    value="bf16",
    reason="faster than fp32 on the first batches of this very model",
    parity=Parity.TOLERANT,
    ratio=1.8213,
    low=1.79,
    high=1.85,
    floor=0.01,
)
PLAIN = JobResult("plain loop", 3000, 21.34, 22, 5, 13.4, 0.9861)
FLATOUT = JobResult("Flatout", 12_600, 5.08, 6, 5, 5.5, 0.9868)


def resolved(**choices: Choice) -> ResolvedRecipe:
    plain = {
        field: Choice(value=sections.PLAIN.get(field, 1), reason="no gain", parity=Parity.EXACT)
        for field in sections.FIELDS
        if Recipe().get(field) == "auto"
    }
    return Recipe().resolve({**plain, **choices}, {})


def shown(what: RenderableType, width: int = 80) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(what)
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_a_change_shows_its_five_facts_at_every_width(width: int) -> None:
    text = shown(Changes(resolved(**{"compute.precision": BF16})), width)
    for fact in ("compute.precision", "bf16", "rounding", "1.82x [1.79,1.85]"):
        assert fact in text
    assert BF16.reason in " ".join(text.split())
    assert "memory_format" not in text
    assert all(len(line) <= width for line in text.splitlines())


def test_an_unmeasured_change_shows_no_ratio() -> None:
    asked = Choice(value="bf16", reason="asked for", parity=Parity.TOLERANT)
    text = shown(Changes(resolved(**{"compute.precision": asked})))
    assert "asked for" in text
    assert "x [" not in text


def test_nothing_changed_is_said() -> None:
    assert shown(Changes(resolved())).strip() == "as plain PyTorch: no setting was changed"


def test_markup_in_values_is_shown_as_it_is() -> None:
    choice = Choice(value=(0, 1), reason="[bold]not markup[/bold]", parity=Parity.EXACT)
    text = shown(Changes(resolved(**{"process.affinity": choice})))
    assert "[0, 1]" in text
    assert "[bold]not markup[/bold]" in text


def test_lanes_are_bars_in_proportion() -> None:
    text = shown(Lanes({"input": 250.0, "forward": 125.0, "backward": 122.0, "gc": 3.0}), 120)
    assert text.startswith("step 500 ms  input ")
    wait, forward, backward, other = text.rstrip().split("|")
    assert wait.count("█") == 2 * forward.count("█") == 2 * backward.count("█") > 4
    assert other == " other 3"


def test_no_step_is_said() -> None:
    assert "no step was recorded" in shown(Lanes({}))


def test_without_unicode_bars_are_ascii() -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    console = Console(file=file, width=80)
    console.print(
        Lanes({"input": 3.0, "forward": 1.0}), Comparison([JobResult("plain", 1, 1, 1, 1, 1)])
    )
    file.seek(0)
    assert "input ##" in file.read()


def test_jobs_are_compared_with_the_first() -> None:
    jobs = [PLAIN, FLATOUT]
    plain, flatout = shown(Comparison(jobs)).strip().splitlines()[-2:]
    assert plain.split() == [
        "plain",
        "loop",
        "3,000",
        "21.3",
        "ms",
        "5",
        "13.4",
        "s",
        "98.61%",
        "1.00x",
    ]
    assert flatout.split() == [
        "Flatout",
        "12,600",
        "5.08",
        "ms",
        "5",
        "5.5",
        "s",
        "98.68%",
        "4.20x",
    ]


def test_an_accuracy_that_was_not_measured_is_not_compared() -> None:
    jobs = [JobResult("plain loop", 3000, 21.34, 22, 1.75, 35), FLATOUT]
    text = shown(Comparison(jobs))
    assert "not compared" in text
    assert " 1.75 " in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_a_machine_that_was_busy_is_said() -> None:
    assert "rough" not in shown(Comparison([PLAIN, FLATOUT]))
    disturbed = replace(FLATOUT, step_p90_ms=9.0)
    text = shown(Comparison([PLAIN, disturbed]))
    assert "the speeds are rough" in " ".join(text.split())
