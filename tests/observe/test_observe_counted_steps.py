"""A step that several rounds of a loop go into is told from the losses of one round."""

import pytest

from flatout.observe.counted_steps import is_counted
from flatout.observe.observation import Site

ROUNDS = {
    "counted": """
        for i in range(9):
            loss.backward()
            if (i + 1) % 4 == 0:
                optimizer.step()
    """,
    "by_a_name": """
        for i in range(9):
            is_last = not i % 4
            with autocast():
                loss.backward()
            if is_last or i == 8:
                clip()
                optimizer.step()
    """,
    "in_a_function": """
        def train_one(i):
            loss.backward()
            if i % 4:
                return
            else:
                optimizer.step()
    """,
    "two_halves": """
        for i in range(9):
            for rows in (real, fake):
                loss.backward()
            if i % 2 == 0:
                optimizer.step()
    """,
    "parts_of_a_batch": """
        for it in range(9):
            for micro_step in range(grad_accum):
                with autocast():
                    loss = model(next(batches))
                loss.backward()
            clip()
            optimizer.step()
    """,
    "parts_and_their_losses": """
        for it in range(9):
            for micro_step in range(4):
                for loss in losses:
                    loss.backward()
            optimizer.step()
    """,
    "tasks": """
        for it in range(9):
            for task in range(4):
                loss.backward()
            optimizer.step()
    """,
    "each_round": """
        for i in range(9):
            loss.backward()
            if i % 2 == 0:
                log()
            optimizer.step()
    """,
    "both_now_and_then": """
        for i in range(9):
            if i % 5 == 0:
                loss.backward()
                optimizer.step()
    """,
    "if_finite": """
        for i in range(9):
            loss.backward()
            if finite:
                optimizer.step()
    """,
    "no_python": """
        for i in
            loss.backward()
            if i % 2 == 0:
                optimizer.step()
    """,
}


@pytest.mark.parametrize("name", ROUNDS)
def test_a_step_of_several_rounds_is_told(name, tmp_path):
    lines = [line[8:] for line in ROUNDS[name].splitlines()]
    file = tmp_path / "script.py"
    file.write_text("\n".join(lines))
    backward, step = (
        Site(str(file), next(at for at, line in enumerate(lines, 1) if words in line))
        for words in ("backward", "optimizer.step")
    )
    told = ("counted", "by_a_name", "in_a_function", "parts_of_a_batch")
    assert is_counted(backward, step) is (name in told)
    assert not is_counted(Site("other.py", 1), step)
