"""The cuts that a fit chooses among: those of its own times, and that of the run before.

Times differ a little from run to run and from rank to rank, and so may the cuts that they show.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from flatout.atomic_file import atomic_write
from flatout.cache_folder import kind_folder, private
from flatout.models import Cut, Cuts
from flatout.world import World


def agreed_cuts(found: Cuts, why: str, world: World) -> tuple[list[Cut], str]:
    """Rank 0's cuts on every rank; or why there are none on one of them.

    All ranks call it, also one that has none, in the autocast of the steps.

    Args:
        found: what this rank found.
        why: this rank has none, where it should; "" otherwise.
        world: of the ranks.
    """
    places = [cut.place for cut in found.cuts]
    before = _place_before(found) if places and world.is_first else None
    if before is not None and before not in places:
        places.append(before)
    every = world.gather([why, places])
    why = next((reason for reason, _ in every if reason), "")
    if why or not every[0][1]:
        return [], why
    known = {tuple(cut.place): cut for cut in found.cuts}
    more = found.at([place for place in every[0][1] if tuple(place) not in known])
    known |= {tuple(cut.place): cut for cut in more}
    alike = [known[tuple(place)] for place in every[0][1] if tuple(place) in known]
    cuts = list({cut.name: cut for cut in reversed(alike)}.values())[::-1]
    names = world.gather([cut.name for cut in cuts])
    is_same = all(others == names[0] for others in names)
    return (cuts, "") if is_same else ([], "ranks find other cuts")


def remember(found: Cuts, cut: Cut) -> None:
    """Let the next run with this forward look at the cut whose rows this one keeps."""
    with suppress(OSError), atomic_write(_path(found), opener=private) as file:
        file.write(json.dumps(cut.place))


def _place_before(found: Cuts) -> list[int] | None:
    with suppress(OSError, ValueError):
        place = json.loads(_path(found).read_text())
        if isinstance(place, list) and all(isinstance(one, int) for one in place):
            return place
    return None


def _path(found: Cuts) -> Path:
    return kind_folder("features") / f"{found.calls}.cut"
