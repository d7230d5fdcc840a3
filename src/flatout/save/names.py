"""Names that wrappers put around a module's own keys."""

from __future__ import annotations

from collections.abc import Iterable

# torch.compile, FSDP and activation checkpointing insert a level wherever they wrap a module.
_LEVELS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")

# DataParallel and DistributedDataParallel; LightningModule by habit.
DDP = "module."
LIGHTNING = "model."
# torch's AveragedModel (EMA, SWA) puts "module." before each name and counts in a buffer.
AVERAGED = "n_averaged"


def without_levels(names: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Each name without the levels that wrappers insert anywhere in it, and which were found."""
    plain: dict[str, str] = {}
    wrappers: set[str] = set()
    for name in names:
        levels = name.split(".")
        wrappers.update(level for level in levels if level in _LEVELS)
        plain[name] = ".".join(level for level in levels if level not in _LEVELS)
    return plain, [f"{level}." for level in _LEVELS if level in wrappers]


def all_begin(names: Iterable[str], prefix: str) -> bool:
    """Whether there are names and each begins with `prefix`."""
    listed = list(names)
    return bool(listed) and all(name.startswith(prefix) for name in listed)


def is_averaged(names: Iterable[str]) -> bool:
    """Return whether these are the names of torch's AveragedModel."""
    listed = set(names)
    return AVERAGED in listed and all_begin(listed - {AVERAGED}, DDP)
