"""By which rule a tool has named a cause: made-up answers in the form that each tool gives."""

import ast

import pytest

from doctor_peers import SCRIPTS, Said, judged, lightning_ports, rows_of_torch, with_traceml
from pitfalls import read_index

PITFALLS = {pitfall.name: pitfall for pitfall in read_index()}
ZERO = PITFALLS["workers_zero"]
INPUT_BOUND = [
    "Verdict: INPUT-BOUND  (CRITICAL)",
    "Why: Input Wait took 64% of Step Time.",
    "Next: Increase workers, prefetch, or storage throughput.",
]


def test_a_verdict_counts_for_what_it_says():
    found = judged("TraceML", ZERO, Said(INPUT_BOUND))
    assert (found.part, found.cause, found.cure, found.proved) == (True, True, True, False)
    assert found.words == "part, cause, cure"
    compute = ["Verdict: COMPUTE-BOUND", "Next: Optimize model compute or reduce step cost."]
    assert judged("TraceML", ZERO, Said(compute)).words == "nothing of it"


def test_a_marked_line_is_a_cause_however_it_is_written():
    line = min(ZERO.marked)
    for place in (f"workers_zero.py({line}): main", f"a/workers_zero.py:{line} in main"):
        assert judged("t", ZERO, Said([f"aten::mm 12% {place}"])).cause
    for place in (f"workers_zero.py({line}0): main", f"other_zero.py:{line}"):
        assert not judged("t", ZERO, Said([f"aten::mm 12% {place}"])).cause


def test_the_name_of_a_script_is_no_cause():
    garbage = PITFALLS["garbage_each_step"]
    row = ["aten::mm 60% a/garbage_each_step.py(7): main"]
    assert judged("t", garbage, Said(row)).words == "nothing of it"


def test_a_cure_counts_with_its_cause_and_a_proof_with_its_cure():
    cure = "do: DataLoader(..., num_workers=1, persistent_workers=True)"
    ratio = "2.00x do: DataLoader(..., num_workers=1)"
    assert judged("t", ZERO, Said([cure], [ratio])).words == "part, cause, cure, proved"
    assert not judged("t", ZERO, Said([cure], ["1.20x fused=True"])).proved
    unfused = PITFALLS["optimizer_unfused"]
    assert not judged("t", unfused, Said([cure], [ratio])).part


def test_who_was_not_asked_has_a_reason():
    assert judged("t", ZERO, Said(reason="traceml_ai is absent")).words == "traceml_ai is absent"


TABLE = """\
-------  ------------  ------------  ----------------------------
   Name    Self CPU %      Self CPU  Source Location
-------  ------------  ------------  ----------------------------
aten::mm        60.00%       6.000ms  train.py(41): main
                                      train.py(60): <module>

aten::add        4.00%       1.000us  train.py(7): forward
-------  ------------  ------------  ----------------------------
Self CPU time total: 10.000ms
"""


def test_rows_of_a_profiler_keep_the_lines_below_them():
    first, second = rows_of_torch(TABLE)
    assert first == "aten::mm 60.00% 6.000ms train.py(41): main train.py(60): <module>"
    assert second.endswith("train.py(7): forward")
    row = "aten::add        4.00%       1.000us  train.py(7): forward\n"
    assert len(list(rows_of_torch(TABLE.replace(row, row * 20)))) == 10


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_is_in_the_corpus_and_takes_the_lines_of_traceml(name):
    pitfall = PITFALLS[name]
    source = with_traceml(pitfall.script.read_text())
    tree = ast.parse(source)
    (traced,) = [
        one
        for one in ast.walk(tree)
        if isinstance(one, ast.With) and "trace_step" in ast.unparse(one.items[0])
    ]
    assert "optimizer.step()" in ast.unparse(traced)
    assert 'traceml_ai.init(mode="auto")' in source


def test_ports_are_of_scripts_that_are_shown():
    assert lightning_ports() <= set(SCRIPTS)
