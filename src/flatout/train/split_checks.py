"""Checks for arrays that are sorted by label, if a part of them is held out for validation."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from flatout.data import Arrays

# Maximum number of different target values that count as classes.
_MOST_CLASSES = 1000
_SHOWN = 5
# Fraction of validation labels missing in training, above which they are reported: a rare label may
# be held out by chance.
_MOST_UNSEEN = 0.5


def split_words(trained: Any, held_out: Any) -> str | None:
    """Return a line if validation has labels that training lacks, or only a few; else None."""
    own, others = _labels(trained), _labels(held_out)
    if own is None or others is None:
        return None
    missing = np.setdiff1d(others, own)
    is_sorted = bool((np.diff(own) >= 0).all()) and own[-1] <= others[0] and own[0] < own[-1]
    if len(missing) and (is_sorted or np.isin(others, missing).mean() > _MOST_UNSEEN):
        shown = ", ".join(map(str, missing[:_SHOWN])) + (", ..." if len(missing) > _SHOWN else "")
        found = f"labels that no sample of training has: {shown}"
    elif is_sorted and len(np.unique(others)) < len(np.unique(own)):
        found = f"only {len(np.unique(others))} of {len(np.unique(own))} labels"
    else:
        return None
    why = "; the data are sorted by label" if is_sorted else ""
    return (
        f"validation_split holds out the last {len(others):,} samples, which have {found}{why}: "
        "shuffle the arrays first, or hold out some samples of each label, with "
        "flatout.data.arrays(x, y).split(0.8, seed=1, stratify=True)"
    )


def _labels(given: Any) -> Any:
    """Return targets that are one whole number for each sample; None for other targets."""
    targets = given.targets if isinstance(given, Arrays) else given
    if not (torch.is_tensor(targets) or isinstance(targets, np.ndarray)):
        return None
    labels = targets.detach().cpu().numpy() if torch.is_tensor(targets) else targets
    if labels.dtype.kind not in "iub" or labels.size != len(labels) or not len(labels):
        return None
    labels = labels.reshape(-1)
    return labels if len(np.unique(labels)) <= min(_MOST_CLASSES, len(labels) // 2) else None
