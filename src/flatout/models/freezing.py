"""Freezing parts of a model, and letting them train again."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import TypeVar

import torch
from torch import nn

from flatout.errors import ModelError
from flatout.models.adapter import adapter_of
from flatout.models.dangers import moving_norms
from flatout.models.hold import matching

_M = TypeVar("_M", bound=nn.Module)
Patterns = str | Iterable[str]


def freeze(model: _M, until: str | None = None, *, layers: Patterns = ()) -> _M:
    """Keep parts of a model as they are: no parameter trains, nothing acts as in training.

        flatout.freeze(model, until="features.23")
        flatout.freeze(model, layers=["encoder.layer.[0-5]", "embeddings"])
        flatout.freeze(model.backbone)

    The parameters no longer require gradients. BatchNorm uses its running statistics without
    updating them, and dropout drops nothing. Both stay so when code, such as a Trainer, calls
    `.train()` on the model or a part of it. A copy or pickle of the model is frozen in the same
    way, and the state dict stays the same. Freezing twice has the effect of freezing once.

    Frozen layers of a Keras model get `trainable=False`, and layers that draw random numbers run as
    in inference. Layers that augment the data, such as RandomFlip, remain active. A Keras model
    that was saved, cloned or copied keeps `trainable`, but its dropout acts until the model is
    frozen again.

    Args:
        model: the user's own object; it is changed in place.
        until: the last layer to freeze: its name in `model.named_modules()`, or `layer.name` of a
            Keras layer. All modules that the layer's output depends on are frozen too. They are
            found by the graph of each `forward`. If a graph is not certain, all modules registered
            before the layer are frozen, and the parameters that the modules around the layer hold
            themselves.
        layers: names of layers, with `*`, `?` and `[0-9]` as in file names; each is frozen with all
            parts inside it.

    Without `until` and `layers` the whole model is frozen.

    Returns:
        The same model.

    Raises:
        ModelError: the model has no layer of such a name; the message lists similar names.
    """
    own, patterns = adapter_of(model), _listed(layers)
    if until is not None:
        own.hold_until(_only(own.named(), until))
    chosen = _chosen(own.named(), patterns)
    own.hold(chosen if until is not None or patterns else [model])
    return model


def unfreeze(model: _M, layers: Patterns | None = None, *, batch_norm: bool = False) -> _M:
    """Let frozen parts of a model train again.

    Dropout acts in training again. BatchNorm layers stay as they are, with statistics, weight and
    bias: on the small batches of fine-tuning their statistics would move away from those that the
    other layers were trained with. A BatchNorm layer that was frozen only by `requires_grad =
    False` also stays as it was: its statistics move in training.

    Args:
        model: the user's own object; it is changed in place.
        layers: names of layers as in `freeze`, each with all parts inside it; None for all.
        batch_norm: whether BatchNorm layers also train and update their statistics again.

    Returns:
        The same model.

    Raises:
        ModelError: the model has no layer of such a name; the message lists similar names.
    """
    own = adapter_of(model)
    chosen = [model] if layers is None else _chosen(own.named(), _listed(layers))
    own.release(chosen, batch_norm=batch_norm)
    return model


def frozen_parameters(
    model: nn.Module, layers: Patterns | None = None, *, batch_norm: bool = False
) -> list[torch.Tensor]:
    """Return the parameters that `unfreeze` may let train.

    Raises:
        ModelError: as for `unfreeze`.
    """
    own = adapter_of(model)
    chosen = [model] if layers is None else _chosen(own.named(), _listed(layers))
    return own.frozen(chosen, batch_norm=batch_norm)


def moving_within(model: nn.Module, layers: Patterns | None = None) -> list[str]:
    """Return the BatchNorms of these layers that do not train but still update their statistics.

    They are frozen only by `requires_grad`, not by `freeze`.
    """
    chosen = [model] if layers is None else _chosen(adapter_of(model).named(), _listed(layers))
    parts = {id(part) for layer in chosen for part in layer.modules()}
    modules = dict(model.named_modules())
    return [name for name in moving_norms(model) if id(modules[name]) in parts]


def _listed(layers: Patterns) -> list[str]:
    return [layers] if isinstance(layers, str) else list(layers)


def _chosen(named: list[tuple[str, nn.Module]], patterns: list[str]) -> list[nn.Module]:
    result = matching({name for name, _ in named}, patterns)
    for pattern, names in result.items():
        if not names:
            raise _unknown(pattern, named)
    wanted = {name for names in result.values() for name in names}
    return [module for name, module in named if name in wanted]


def _only(named: list[tuple[str, nn.Module]], name: str) -> nn.Module:
    result = {id(module): module for own, module in named if own == name}
    if not result:
        raise _unknown(name, named)
    return list(result.values())[-1]  # the module inside a wrapper of the same name


def _unknown(name: str, named: list[tuple[str, nn.Module]]) -> ModelError:
    names = list(dict.fromkeys(own for own, _ in named if own))
    end = name.rpartition(".")[2]
    near = [*get_close_matches(name, names, 5), *(n for n in names if end in n.split("."))]
    shown = list(dict.fromkeys(near))[:5] or names[:5]
    words = ", ".join(map(repr, shown)) or "none, as it has no parts"
    return ModelError(
        f"the model has no layer {name!r}; {'near it are' if near else 'it has'}: {words}",
        do="choose a name as model.named_modules() lists it, or the name of a Keras layer",
    )
