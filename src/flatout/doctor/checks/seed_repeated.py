"""Check for generators that are seeded during training, each time with the same seed."""

from __future__ import annotations

from collections.abc import Sequence

from flatout.doctor.checks.check import Findings, NoSignal, check
from flatout.doctor.checks.signals import at
from flatout.doctor.finding import Finding
from flatout.observe import Observation, RepeatedSeed

_ORDER, _OF_ORDERS = "torch.randperm", "torch.manual_seed"
_NAMED = 3


@check(hooks=True)
def look(observation: Observation) -> Findings:
    """Report lines that repeatedly seed a generator that training draws from with the same seed."""
    repeated = observation.repeated_seeds
    if repeated is None:
        raise NoSignal("the seeding of random numbers was not observed")
        # If the reseeded generator is known, the orders that it draws add no information.
    seeds = [item for item in repeated if item.kind != _ORDER] or list(repeated)
    if _is_told_of_loader(observation):
        seeds = [item for item in seeds if item.kind not in (_ORDER, _OF_ORDERS)]
    if seeds:
        yield _finding(seeds)


def _is_told_of_loader(observation: Observation) -> bool:
    loaders = [loader for loader in observation.loaders if loader.in_training and loader.shuffles]
    hashes = [loader.hashes or [] for loader in loaders]
    return any(len(item) > 1 and len(set(item)) == 1 for item in hashes)


def _finding(seeds: Sequence[RepeatedSeed]) -> Finding:
    first = seeds[0]
    steps = [f"{step:,}" for step in first.steps[:_NAMED]]
    more = ", ..." if len(first.steps) > _NAMED else ""
    when = f"after {', '.join(steps)}{more} steps"
    again = "orders, noise and augmentation repeat exactly"
    others = ", ".join(f"{item.kind} ({at(item.site)})" for item in seeds[1:_NAMED])
    also = f"; the same holds for {others}" if others else ""
    return Finding(
        kind="danger",
        what=f"{_told(first)}, {when}{also}: {again}",
        do="seed once, before the first epoch, or draw from seed + epoch",
        where=at(first.site),
        parity="changes learning",
    )


def _told(item: RepeatedSeed) -> str:
    if item.kind == _ORDER:
        return f"{item.kind} gave the same order each time"
    if item.seed is not None:
        return (
            f"{item.kind} draws the same numbers each time, from a torch.Generator that is seeded "
            f"with {item.seed} again"
        )
    return f"{item.kind} begins with the same seed each time"
