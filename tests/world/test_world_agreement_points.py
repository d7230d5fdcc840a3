"""All that ask at a point read the same verdict, in whichever order they come."""

from concurrent.futures import ThreadPoolExecutor
from time import sleep

import pytest
import torch.distributed as dist

from flatout.world.agreement_points import all_ask


@pytest.mark.parametrize(
    ("pauses", "passed", "patience_s", "together"),
    [
        ([0.0, 0.0, 0.0], False, 60, True),
        ([0.0, 0.2, 0.05], False, 60, True),
        ([0.0, 0.1], True, 60, False),  # of three one has gone on
        ([0.0, 0.1], False, 0.3, False),  # of one nothing is known
    ],
)
def test_who_asks_hears_whether_all_do(pauses, passed, patience_s, together):
    store = dist.HashStore()
    for point in (4, 5):  # verdicts are of one point

        def ask(pause, point=point):
            sleep(pause)
            return all_ask(store, point, 3, lambda _: passed, patience_s)

        with ThreadPoolExecutor(len(pauses)) as ranks:
            assert list(ranks.map(ask, pauses)) == [together] * len(pauses)


def test_one_that_comes_late_hears_what_the_others_have_heard():
    store = dist.HashStore()
    assert not all_ask(store, 1, 2, lambda _: False, 0.0)
    assert not all_ask(store, 1, 2, lambda _: False, 60)
