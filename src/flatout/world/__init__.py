"""The ranks of one job: where this one stands, and what they do together."""

from flatout.world.place import ALONE, Place, place, restarts
from flatout.world.world import ONE, Group, Later, LostRank, World, join, leave

__all__ = [
    "ALONE",
    "ONE",
    "Group",
    "Later",
    "LostRank",
    "Place",
    "World",
    "join",
    "leave",
    "place",
    "restarts",
]
