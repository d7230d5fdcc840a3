"""The lines that make a model's batch are found through names, over functions and loops."""

import textwrap

import pytest

from flatout.observe.origins import origins

LOOP = """
    def batches(x):
        for at in range(4):
            rows = x[at:]                                    # in batches: found by its caller
            yield rows

    def fit(model, x, report):
        total = 0
        for number, rows in enumerate(batches(x)):           # makes
            scaled = rows / rows.max()                       # makes
            noise: float = report.noise()                    # makes
            if number:
                scaled = scaled + noise                      # makes
            out = model(scaled, scale=2)                     # the call
            total += out.sum()
            report.add(total)
"""


def lines(source, words):
    return {at for at, line in enumerate(source.splitlines(), 1) if line.endswith(f"# {words}")}


def test_what_goes_into_the_batch_is_found_and_nothing_else(tmp_path):
    file = tmp_path / "loop.py"
    source = textwrap.dedent(LOOP)
    file.write_text(source)
    (call,) = lines(source, "the call")
    found = origins((str(file), call), [])
    assert found == {(str(file), line) for line in lines(source, "makes")}


def test_a_parameter_is_followed_to_its_caller(tmp_path):
    loop, steps = tmp_path / "loop.py", tmp_path / "steps.py"
    steps.write_text("def step(model, batch):\n    rows, _ = batch\n    return model(rows)\n")
    loop.write_text(
        "from steps import step\n"
        "while True:\n"
        "    batch = draw(\n"
        "        64)\n"
        "    other = log()\n"
        "    step(net, batch)\n"
    )
    found = origins((str(steps), 3), [(str(loop), 6)])
    assert found == {(str(steps), 2), (str(loop), 3), (str(loop), 4)}


@pytest.mark.parametrize("source", ["def broken(:\n", ""])
def test_source_that_cannot_be_read_makes_nothing(tmp_path, source):
    file = tmp_path / "loop.py"
    file.write_text(source)
    assert origins((str(file), 1), []) == set()
    assert origins((str(tmp_path / "gone.py"), 1), []) == set()
