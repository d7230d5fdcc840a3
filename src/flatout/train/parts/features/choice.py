"""The choice of features to keep for a model with frozen leading layers: none, or at one cut.

The choice is based on measured times, planned epochs, and free memory and disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flatout.models import Cut, Cuts
from flatout.words import counted, rounded, size_words
from flatout.world import World

# Assumed number of remaining epochs in a run of unknown length.
_UNKNOWN = 5
# Minimum fraction of the run's time that keeping features must save.
_LEAST = 0.03


@dataclass(frozen=True)
class FeatureOption:
    """A kind of data that may be kept for each sample.

    Attributes:
        name: description of the cut, such as "behind features.16 (MaxPool2d)"; or "decoded pixels".
        saved_s: seconds saved per sample that is kept.
        bytes: bytes per sample.
        variants: number of augmented versions of each sample, called variants.
        read_s: seconds to read a sample's row, or to write it.
        room: free bytes in the store's memory or disk.
        filled: fraction of all samples and variants that is kept already.
        hosts: number of hosts, which each keep the features that they compute.
        stays: whether a sample is read by the same host in each epoch. If so, each host keeps only
            its own samples; else each host will need all samples.
    """

    name: str
    saved_s: float
    bytes: int
    variants: int
    read_s: float
    room: float
    filled: float = 0.0
    hosts: int = 1
    stays: bool = True

    @property
    def of_hosts(self) -> str:
        """Description of the rows that each host keeps."""
        each = f"each of {self.hosts} hosts"
        return f"{each} keeps the rows of its part" if self.stays else f"{each} keeps all rows"

    def share(self, samples: int) -> float:
        """Return the fraction of all samples and variants that are kept or fit into free bytes."""
        return min(1.0, self.filled + self.room / max(1, self.whole_bytes(samples)))

    def whole_bytes(self, samples: int) -> int:
        """Return the bytes of all samples and variants that a host will need."""
        parts = self.hosts if self.stays else 1
        return -(-samples // parts) * self.variants * self.bytes


@dataclass(frozen=True)
class Choice:
    """The decision on keeping features.

    Attributes:
        kept: the chosen option; None for no features.
        why: the reason why nothing is kept; "" if an option is chosen.
        plain_s: seconds per sample if nothing is kept.
        later_s: seconds per sample once all samples are kept.
        pays_from: the epoch, counted from 1, from which on the run has saved time.
        whole_bytes: bytes of all samples and variants, on each host.
        share: fraction of all samples and variants that are kept already or fit into the free
            bytes.
    """

    kept: FeatureOption | None
    why: str = ""
    plain_s: float = 0.0
    later_s: float = 0.0
    pays_from: int = 0
    whole_bytes: int = 0
    share: float = 1.0

    def as_dict(self) -> dict[str, Any]:
        """Return the choice as plain data."""
        return asdict(self)

    def words(self, where: str, precision: str) -> str:
        """Describe the kept data, their place `where` ("disk" or "memory"), and their gain."""
        if self.kept is None:
            return self.why
        kept = self.kept
        each = f"{size_words(kept.bytes)} a sample in {precision}"
        if kept.variants > 1:
            each += f", {counted(kept.variants, 'variant')}"
        place = "on disk" if where == "disk" else "in memory"
        total = f"{size_words(self.whole_bytes)} {place}, {size_words(kept.room)} free"
        if self.share < 1:
            total += f", room for {self.share:.0%}"
        if kept.hosts > 1:
            total += f", {kept.of_hosts}"
        pays = "from the start" if self.pays_from <= 1 else f"from epoch {self.pays_from} on"
        rates = f"{rounded(1 / self.plain_s)} -> {rounded(1 / self.later_s)} samples/s"
        return f"kept {kept.name} ({each}: {total}) · pays {pays}: {rates}"


def choose(
    options: Sequence[FeatureOption], samples: int, epochs: int | None, plain_s: float
) -> Choice:
    """Return the option that takes the least time over all remaining epochs."""
    left = _UNKNOWN if epochs is None else epochs
    best, least, why = None, plain_s * left, ""
    for option in options:
        result = _of(option, samples, left, plain_s)
        spent = sum(_epochs(option, samples, left, plain_s))
        if spent < min(least, (1 - _LEAST) * plain_s * left) and result.pays_from:
            best, least = result, spent
    if best is not None:
        return best
    most = max(options, key=lambda value: value.saved_s)
    if left < 2 and not most.filled:
        why = "nothing kept: a single epoch is left"
    elif most.room < most.bytes:
        why = f"nothing kept: no room for {size_words(most.bytes)} a sample"
    else:
        why = (
            f"nothing kept: {rounded(1e3 * most.saved_s)} of {rounded(1e3 * plain_s)} ms a sample "
            f"could be saved, and reading takes {rounded(1e3 * most.read_s)} ms"
        )
    return Choice(None, why, plain_s)


def _of(option: FeatureOption, samples: int, epochs: int, plain_s: float) -> Choice:
    whole = option.whole_bytes(samples)
    later = max(0.0, plain_s - option.saved_s) + option.read_s
    ahead, pays_from = 0.0, 0
    for epoch, spent in enumerate(_epochs(option, samples, epochs, plain_s), 1):
        ahead += plain_s - spent
        if ahead > 0 and not pays_from:
            pays_from = epoch
    return Choice(option, "", plain_s, later, pays_from, whole, option.share(samples))


def _epochs(option: FeatureOption, samples: int, epochs: int, plain_s: float) -> Iterator[float]:
    room = option.share(samples)
    later = max(0.0, plain_s - option.saved_s) + option.read_s
    there = option.filled
    # In each epoch a sample is read as one of its variants, by one of the hosts.
    ways = option.variants * (1 if option.stays else option.hosts)
    for _ in range(epochs):
        yield there * later + (1 - there) * (plain_s + option.read_s * (there < room))
        there = max(there, min(room, there + (1 - there) / ways))


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
    return (
        (cuts, "") if is_same else ([], "the ranks do not agree on the layer to keep features of")
    )
