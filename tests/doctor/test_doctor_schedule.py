"""How often both sides of a trial are begun, and when."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from flatout.doctor.trials.schedule import Lives


@given(st.data(), st.integers(1, 40))
def test_lives_are_spread_over_the_quadruples_there_is_room_for(data, quadruples):
    lives = Lives(data.draw(st.integers(1, min(6, quadruples))), quadruples)
    restarts = [done for done in range(quadruples) if lives.restart(4 * done)]
    assert len(restarts) == lives.count - 1
    assert lives.fewest == (restarts[-1] if restarts else 0) + 1
    each = [end - begin for begin, end in itertools.pairwise([0, *restarts, quadruples])]
    assert max(each) - min(each) <= 1
    assert not any(lives.restart(blocks) for blocks in range(4 * quadruples) if blocks % 4)
