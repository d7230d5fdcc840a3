"""What a part of arrays that is held out to validate on lacks, where rows are sorted by label."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from flatout.data import Arrays

# With more labels than that they are numbers rather than classes.
_MOST_CLASSES = 1000
_SHOWN = 5
# A rare label may be among the samples held out by chance.
_MOST_UNSEEN = 0.5


def split_words(trained: Any, held_out: Any) -> str | None:
    """A line on labels that are validated on and never trained on, or sorted; None without any.

    Args:
        trained, held_out: the targets of both parts, or Arrays of both.
    """
    own, others = _labels(trained), _labels(held_out)
    if own is None or others is None:
        return None
    missing = np.setdiff1d(others, own)
    is_sorted = bool((np.diff(own) >= 0).all()) and own[-1] <= others[0] and own[0] < own[-1]
    if len(missing) and (is_sorted or np.isin(others, missing).mean() > _MOST_UNSEEN):
        shown = ", ".join(map(str, missing[:_SHOWN])) + (", ..." if len(missing) > _SHOWN else "")
        found = f"labels that no sample of training has: {shown}"
    elif is_sorted and len(np.unique(others)) < len(np.unique(own)):
        found = f"{len(np.unique(others))} of {len(np.unique(own))} labels alone"
    else:
        return None
    why = "; the data are sorted by label" if is_sorted else ""
    return (
        f"validation_split holds the last {len(others):,} samples out, which have {found}{why}: "
        "shuffle the arrays first, or hold some of each label out, with "
        "flatout.data.arrays(x, y).split(0.8, seed=1, stratify=True)"
    )


def _labels(given: Any) -> Any:
    """Whole numbers, one for each sample, as an array; None of other targets."""
    targets = given.targets if isinstance(given, Arrays) else given
    if not (torch.is_tensor(targets) or isinstance(targets, np.ndarray)):
        return None
    labels = targets.detach().cpu().numpy() if torch.is_tensor(targets) else targets
    if labels.dtype.kind not in "iub" or labels.size != len(labels) or not len(labels):
        return None
    labels = labels.reshape(-1)
    return labels if len(np.unique(labels)) <= min(_MOST_CLASSES, len(labels) // 2) else None
