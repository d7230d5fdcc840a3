"""Candidates for the cut at which features are kept: from this run's times, and from earlier runs.

Measured times differ a little between runs and ranks, so the cuts chosen by them may differ too.
"""

from __future__ import annotations

from collections.abc import Sequence

from flatout.models import Cut, Cuts
from flatout.world import World


def agreed_cuts(
    found: Cuts, why: str, world: World, known: Sequence[list[int]] = ()
) -> tuple[list[Cut], str]:
    """Return rank 0's cuts on every rank; or the reason why a rank has none.

    All ranks call it, also a rank without cuts, in the autocast context of the steps.
    """
    places = [cut.place for cut in found.cuts]
    if places:
        places += [place for place in known if place not in places]
    every = world.gather([why, places])
    why = next((reason for reason, _ in every if reason), "")
    if why or not every[0][1]:
        return [], why
    own = {tuple(cut.place): cut for cut in found.cuts}
    more = found.at([place for place in every[0][1] if tuple(place) not in own])
    own |= {tuple(cut.place): cut for cut in more}
    alike = [own[tuple(place)] for place in every[0][1] if tuple(place) in own]
    cuts = list({cut.name: cut for cut in reversed(alike)}.values())[::-1]
    names = world.gather([cut.name for cut in cuts])
    is_same = all(others == names[0] for others in names)
    return (cuts, "") if is_same else ([], "ranks find other cuts")
