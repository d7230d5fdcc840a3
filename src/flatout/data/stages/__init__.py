"""Stages that a user may apply to a source, each in its own file."""

from __future__ import annotations

from flatout.data.stages.augment import Augment, augment
from flatout.data.stages.balance import Balance, balance
from flatout.data.stages.batch import Batch, batch
from flatout.data.stages.blend import Blended, cutmix, mixup
from flatout.data.stages.cache import Cache, cache
from flatout.data.stages.filter import Filter, filter
from flatout.data.stages.map import Map, map
from flatout.data.stages.normalize import Normalize, normalize
from flatout.data.stages.prefetch import Prefetch, prefetch
from flatout.data.stages.repeat import Repeat, passes, repeat, samples_times, times_of
from flatout.data.stages.shard import Shard, shard
from flatout.data.stages.shuffle import Shuffle, shuffle
from flatout.data.stages.split import Split, split
from flatout.data.stages.stage import Options, P, Plan, Stage, Writable, only

__all__ = [
    "Augment",
    "Balance",
    "Batch",
    "Blended",
    "Cache",
    "Filter",
    "Map",
    "Normalize",
    "Options",
    "Plan",
    "Prefetch",
    "Repeat",
    "Shard",
    "Shuffle",
    "Split",
    "Stage",
    "Staged",
    "only",
    "passes",
    "samples_times",
    "times_of",
]


class Staged(Writable[P]):
    """Base of classes to which all stages can be applied."""

    augment = augment
    balance = balance
    batch = batch
    cache = cache
    cutmix = cutmix
    filter = filter
    map = map
    mixup = mixup
    normalize = normalize
    prefetch = prefetch
    repeat = repeat
    shard = shard
    shuffle = shuffle
    split = split
