"""The adapter for torch modules. keras/model.py has the adapter for Keras models."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parallel import DataParallel, DistributedDataParallel

from flatout.data import arguments_words, code_digest, is_library
from flatout.errors import ModelError
from flatout.models import hold
from flatout.models.rewrites import Rewrite, forward_as_written, rewrites_of
from flatout.models.shards import is_shard, sharded_like, whole

# A function that gets a layer's name and class, its inputs and its output.
Look = Callable[[str, str, tuple[Any, ...], Any], None]


class TorchModel:
    """Common interface to the models of torch and Keras.

    Attributes:
        module: the user's own object.
        rewrites_round: whether rewrites change the layers' results by rounding.
        meets_in_loss: whether the loss function may communicate with other ranks in each batch.
        is_compiled: whether the model has its own loss, metrics and optimizer, by Keras' `compile`.
        framework: the framework that the model is written in.
        calls_hooks: whether calls of its parts run torch's hooks.
        endings: suffixes of the files that the model can be saved as.
        own_files: the suffixes in `endings` whose files the framework itself writes.
        saved_as: description of these suffixes, for messages.
    """

    rewrites_round = False
    meets_in_loss = False
    is_compiled = False
    framework = "torch"
    calls_hooks = True
    endings: tuple[str, ...] = (".safetensors", ".pt", ".pth")
    own_files: tuple[str, ...] = ()
    saved_as = (
        "a torch model's weights are saved as .safetensors, .pt or .pth (torch.save's format); "
        ".keras and .h5 are for Keras models"
    )

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module

    def check(self) -> None:
        """Refuse a model that cannot be trained here.

        Raises:
            ModelError: with the reason.
        """
        if not isinstance(self.module, nn.Module):
            raise ModelError(
                f"a model is a torch.nn.Module, found {type(self.module).__name__}",
                do="pass the module itself, not a function or a state dict",
            )

    def called(self, *, training: bool) -> Any:
        """Return the model as a function of a batch's inputs."""
        return self.module

    def outputs(self, inputs: Any, *, as_written: bool = False) -> Any:
        """Return the forward's outputs for a batch's inputs; hooks of the model itself do not run.

        Args:
            inputs: a tensor, a tuple, or a mapping by argument.
            as_written: whether to run the forward of its class, even if a rewrite is on the model.
        """
        forward = forward_as_written(self.module) if as_written else None
        forward = forward or self.module.forward
        if torch.is_tensor(inputs):
            return forward(inputs)
        return forward(**inputs) if isinstance(inputs, Mapping) else forward(*inputs)

    def parts(self) -> dict[str, Any]:
        """Return, by name, each submodule whose calls can be distinguished."""
        named = self.module.named_modules()
        return {name: part for name, part in named if part is not self.module}

    def scales_images(self) -> bool | None:
        """Return whether a layer scales or normalizes images; None if only a trial shows that."""

    def takes_channels_last(self) -> bool:
        """Return whether its images are of shape (size, height, width, channels)."""
        return False

    def is_batch_coupled(self) -> bool:
        """Return whether a sample's result depends on the other samples of its (micro-)batch."""
        return any(
            isinstance(m, _BatchNorm) and (m.training or not m.track_running_stats)
            for m in self.module.modules()
        )

    def draws_random(self) -> bool:
        """Return whether a training step draws random numbers inside the model."""
        return any(
            (isinstance(m, _DropoutNd) and m.p > 0)
            or isinstance(m, nn.RReLU)
            or (isinstance(m, (nn.RNNBase, nn.MultiheadAttention)) and m.dropout > 0)
            for m in self.module.modules()
        )

    def is_partly_frozen(self) -> bool:
        """Return whether some of its layers do not train."""
        return not all(parameter.requires_grad for parameter in self.module.parameters())

    def rewrites(self) -> list[Rewrite]:
        """Return the rewrites that need less memory traffic. Changes nothing."""
        return rewrites_of(self.module)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return all tensors of the model that a checkpoint saves, by name, without copies.

        If the weights are sharded over ranks, all ranks call this and get whole tensors.
        """
        state = self.module.state_dict()
        own = own_names(self.module, state)
        return {own[name]: whole(value) for name, value in state.items()}

    def replicated(self) -> dict[str, torch.Tensor]:
        """Return the saved tensors that are whole on each rank."""
        state = self.module.state_dict()
        own = own_names(self.module, state)
        return {own[name]: value for name, value in state.items() if not is_shard(value)}

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Load the output of `weights` into the model; names and shapes have been checked."""
        state = self.module.state_dict()
        own = own_names(self.module, state)
        # Tensors of other ranks are on the meta device here.
        values = {name: value for name, value in state.items() if not value.is_meta}
        self.module.load_state_dict(
            {name: sharded_like(weights[own[name]], value) for name, value in values.items()},
            strict=len(values) == len(state),
        )

    def parameters(self) -> list[torch.Tensor]:
        """Return the tensors of the model, without buffers, that a step may change."""
        return list(self.module.parameters())

    def untrained(self) -> list[torch.Tensor]:
        """Return the tensors of the model that a forward may change."""
        return list(self.module.buffers())

    def layers(self) -> list[tuple[str, Any]]:
        """Return each submodule whose calls can be watched, with the submodule's own name."""
        return layers_of(self.module)

    def named(self) -> list[tuple[str, nn.Module]]:
        """Return each layer with the name that the user knows."""
        return layers_of(self.module)

    def hold(self, layers: Iterable[nn.Module]) -> None:
        """Set layers and all parts inside them to neither train nor act as in training."""
        for layer in layers:
            hold.hold(layer)

    def hold_until(self, last: nn.Module) -> None:
        """Hold a layer and all layers that it depends on (see `hold`)."""
        paths = {id(module): path for path, module in self.module.named_modules()}
        hold.hold_until(self.module, paths[id(last)]) if paths[id(last)] else hold.hold(last)

    def release(self, layers: Iterable[nn.Module], *, batch_norm: bool) -> None:
        """Let layers and all parts inside them train again, BatchNorm only if asked."""
        parts = {id(part): part for layer in layers for part in layer.modules()}
        for part in parts.values():
            if batch_norm or not hold.keeps_statistics(part):
                hold.release(part)
        for outer in self.module.modules():
            if any(id(part) in parts for part in outer.modules()) and id(outer) not in parts:
                hold.follow(outer)

    def frozen(self, layers: Iterable[nn.Module], *, batch_norm: bool) -> list[torch.Tensor]:
        """Return the parameters that `release` may let train."""
        parts = {id(part): part for layer in layers for part in layer.modules()}
        result = {
            id(value): value
            for part in parts.values()
            if batch_norm or not hold.keeps_statistics(part)
            for value in part.parameters(recurse=False)
            if not value.requires_grad
        }
        return list(result.values())

    def watch(self, look: Look, watches: ExitStack) -> None:
        """Call `look` after each call of a layer, until `watches` is closed."""

        def hook(name: str, module: nn.Module) -> Callable[..., None]:
            kind = type(module).__name__
            return lambda _module, inputs, output: look(name or "model", kind, inputs, output)

        for name, module in self.layers():
            watches.callback(module.register_forward_hook(hook(name, module)).remove)

    def tables(self) -> Iterator[tuple[str, nn.Module, int]]:
        """Yield name, module and number of rows of each embedding table."""
        for name, module in self.layers():
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
                yield name, module, module.num_embeddings

    def first_layer(self) -> str:
        """Return a description of the first layer with parameters."""
        for name, module in self.module.named_modules():
            if next(module.parameters(recurse=False), None) is not None:
                own = own_names(self.module, [name])[name]
                return f"first layer {own or 'itself'} is {module}"
        return f"{type(self.module).__name__} without parameters"

    def structure(self) -> str:
        """Return the layers and options as text. Models with the same text compute the same."""
        return repr(self.module)

    def lines(self, parts: Iterable[nn.Module] | None = None) -> dict[str, str]:
        """Return for each layer its class, its arguments, and the user's code in it.

        Args:
            parts: the layers to describe; None for all layers.
        """
        own = None if parts is None else set(map(id, parts))
        layers = [layer for layer in self.layers() if own is None or id(layer[1]) in own]
        return {name or "the model": _module_words(module) for name, module in layers}


def uses_convolution(model: nn.Module) -> bool:
    """Return whether the model has 2-D convolutions, whose speed depends on the memory format."""
    return any(isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)) for m in model.modules())


def _module_words(module: nn.Module) -> str:
    words = f"{type(module).__qualname__}({arguments_words(module)})"
    if not is_library(type(module)):
        words += f" code {code_digest(module)[:8]}"
    fixed = [n for n, p in module.named_parameters(recurse=False) if not p.requires_grad]
    return f"{words}, not trained: {', '.join(fixed)}" if fixed else words


# -- names without the levels that wrappers add ----------------------------------------------------


def layers_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return each module with its own name. A wrapper comes before its module, with that name."""
    levels = _wrapped(model)
    return [(_strip_levels(path, levels), module) for path, module in model.named_modules()]


def own_names(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Return each name of a parameter, buffer or module of `model` without the levels of wrappers.

    If two names would become equal, because a wrapper has its own state, all names stay unchanged.
    """
    levels = _wrapped(model)
    own = {name: _strip_levels(name, levels) for name in names}
    return own if len(set(own.values())) == len(own) else {name: name for name in own}


def _wrapped(model: nn.Module) -> set[str]:
    # torch's compiler is imported only if something was compiled.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    compiled = (dynamo.OptimizedModule,) if dynamo is not None else ()
    parameters: set[str] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, (DataParallel, DistributedDataParallel)):
            parameters.add(f"{path}.module".lstrip("."))
        elif isinstance(module, compiled):
            parameters.add(f"{path}._orig_mod".lstrip("."))
    return parameters


def _strip_levels(name: str, levels: set[str]) -> str:
    parts = name.split(".")
    paths = (".".join(parts[: end + 1]) for end in range(len(parts)))
    return ".".join(part for part, path in zip(parts, paths, strict=True) if path not in levels)
