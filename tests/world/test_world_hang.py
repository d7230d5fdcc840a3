"""Who keeps a collective from ending, from what all ranks have told."""

import pytest

from flatout.world.hangs.collective_log import APART, CollectiveLog
from flatout.world.hangs.hang import RankStatus, explain

SUM, GATHER = "sum of gradients", "loss of an evaluation"


def stand(begun, waiting=None, *, last=SUM, state="", stack=()):
    recent = [(number, SUM, number) for number in range(1, begun)] + [(begun, last, begun)]
    return RankStatus(begun, waiting, recent, f"process {begun}", state, list(stack))


def test_the_rank_that_has_not_come_is_named_with_its_stack():
    stands = {0: stand(9, 8), 1: stand(7, stack=['  File "train.py", line 3, in load'])}
    hang = explain(8, 0, stands, 31.4)
    assert hang.culprits == (1,)
    assert hang.blame == "rank 1 did not come to sum of gradients, step 8"
    assert hang.lines == [
        "rank 0 has waited 31 s in sum of gradients, step 8 for rank 1",
        "  rank 1 (process 7) was last in sum of gradients, step 7",
        "  its Python stack:",
        '    File "train.py", line 3, in load',
    ]


def test_a_rank_that_waits_for_the_missing_one_itself_is_not_blamed():
    stands = {0: stand(8, 8), 1: stand(7, 7), 2: stand(6)}
    assert explain(8, 0, stands, 31).culprits == (2,)


def test_a_rank_that_waits_elsewhere_is_blamed_where_no_other_can_be():
    hang = explain(8, 0, {0: stand(8, 8), 1: stand(7, 7, last=GATHER)}, 31)
    assert hang.culprits == (1,)
    assert "rank 1 (process 7) waits in loss of an evaluation, step 7" in hang.lines[1]


def test_other_collectives_are_named_with_both_places():
    stands = {0: stand(8, 8, stack=["  here"]), 1: stand(8, 8, last=GATHER, stack=["  there"])}
    hang = explain(8, 0, stands, 31)
    assert hang.culprits == (0, 1)
    assert "while rank 1 came to another collective: loss of an evaluation" in hang.lines[0]
    assert hang.lines.count("  its Python stack:") == 2


def test_a_rank_that_came_and_does_not_answer():
    stands = {0: stand(8, 8), 1: stand(8, 8, state="is stopped")}
    hang = explain(8, 0, stands, 31)
    assert hang.lines[0].endswith("and rank 1 did not answer")
    assert "rank 1 (process 8) is stopped; when it last told, it was last in" in hang.lines[1]


def test_a_rank_that_never_told_anything():
    hang = explain(8, 0, {0: stand(8, 8), 1: RankStatus(state="has not joined the others")}, 31)
    assert "rank 1 has not joined the others" in hang.lines[1]


def test_ranks_that_step_apart_name_the_one_that_makes_no_step():
    stands = {0: stand(3, APART), 1: stand(3, stack=["  there"]), 2: stand(3, APART)}
    hang = explain(APART, 0, stands, 4.2)
    assert hang.culprits == (1,)
    waited = "rank 0 has waited 4 s for steps of other ranks"
    assert hang.lines[0] == f"{waited}: no step came from rank 1"
    assert "  there" in hang.lines[-1]
    stands[1] = stand(3, APART)
    assert explain(APART, 0, stands, 4.2).culprits == ()


def test_all_have_come_so_it_is_the_network():
    hang = explain(8, 1, {0: stand(8, 8), 1: stand(9, 8)}, 31)
    assert hang.culprits == ()
    assert "look at the network" in hang.lines[0]


def test_a_rank_that_computes_within_a_collective_keeps_the_others_waiting():
    hang = explain(8, 0, {0: stand(8, 8), 1: stand(8, stack=["  here"]), 2: stand(8, 8)}, 31)
    assert hang.culprits == (1,)
    assert hang.lines[0].endswith("for what rank 1 is to give")
    assert "here" in hang.lines[-1]


def test_of_many_missing_ranks_some_are_shown():
    stands = {0: stand(8, 8)} | {rank: stand(3, stack=["  here"]) for rank in range(1, 13)}
    hang = explain(8, 0, stands, 31)
    assert hang.lines[0].endswith("for ranks 1, 2, 3, 4, 5, 6, 7, 8 and 4 more")
    assert hang.lines.count("  its Python stack:") == 4


def test_a_collective_without_words_is_called_by_the_line_that_calls():
    log = CollectiveLog()
    assert log.begin("") == 1
    number, what, step = log.recent[0]
    assert (number, step) == (1, 0)
    assert what.startswith("test_a_collective_without_words_is_called_by_the_line_that_calls (")
    assert "test_world_hang.py:" in what


@pytest.mark.parametrize("count", [1, 200])
def test_a_trail_keeps_the_latest(count):
    log = CollectiveLog()
    for number in range(count):
        log.begin(f"sum {number}")
    assert log.begun == count
    assert log.recent[-1][:2] == (count, f"sum {count - 1}")
    assert len(log.recent) <= 64
