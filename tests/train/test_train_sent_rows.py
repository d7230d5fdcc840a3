"""Each host gets each row that it lacks once, from one that has it."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flatout.train.sent_rows import rows_to_send

ROWS = 12


@st.composite
def hosts(draw):
    """Nodes of ranks, which rows the host of each has, and which the rank lacks."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    nodes = [node for node, size in enumerate(sizes) for _ in range(size)]
    rows = st.lists(st.booleans(), min_size=ROWS, max_size=ROWS).map(np.array)
    of_node = [draw(rows) for _ in sizes]
    has = [of_node[node] for node in nodes]
    return nodes, has, [draw(rows) & ~own for own in has]


@given(hosts())
def test_what_any_host_has_comes_once_to_each_that_lacks_it(case):
    nodes, has, lacks = case
    came = np.zeros((len(nodes), ROWS), int)  # by host
    for rank, node in enumerate(nodes):
        for receiver, sends in enumerate(rows_to_send(rank, nodes, has, lacks)):
            assert not (sends & ~has[rank]).any()
            assert nodes[receiver] != node or not sends.any()
            came[nodes[receiver]] += sends
    held = np.logical_or.reduce(has)
    for node in set(nodes):
        lacking = np.logical_or.reduce([lacks[r] for r, n in enumerate(nodes) if n == node])
        assert (came[node] == (lacking & held)).all()


def test_hosts_and_their_ranks_take_turns():
    rows = 400
    has = [np.ones(rows, bool)] * 4 + [np.zeros(rows, bool)] * 2
    lacks = [~one for one in has]
    nodes = [0, 0, 1, 1, 2, 2]
    sent = np.array([[way.sum() for way in rows_to_send(r, nodes, has, lacks)] for r in range(6)])
    assert sent.sum() == rows
    assert (abs(sent[:4].sum(1) - rows / 4) <= 4).all()
    assert (abs(sent[:, 4:].sum(0) - rows / 2) <= 4).all()
    assert (sent[:4, 4:] > 0).all()
