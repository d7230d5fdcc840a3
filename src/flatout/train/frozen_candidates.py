"""The cuts that a model's features may be kept at: those of its own times, and earlier runs'.

Times differ a little from run to run and from rank to rank, and so may the cuts that they show.
"""

from __future__ import annotations

from collections.abc import Sequence

from flatout.models import Cut, Cuts
from flatout.world import World


def agreed_cuts(
    found: Cuts, why: str, world: World, known: Sequence[list[int]] = ()
) -> tuple[list[Cut], str]:
    """Rank 0's cuts on every rank; or why there are none on one of them.

    All ranks call it, also one that has none, in the autocast of the steps.
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
