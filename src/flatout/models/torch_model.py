"""What Flatout asks of a model, answered for a torch module; keras/model.py does it for Keras."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from flatout.data import arguments_words, code_digest, is_library
from flatout.errors import ModelError
from flatout.models import hold
from flatout.models.rewrites import Rewrite, forward_as_written, rewrites_of
from flatout.models.shards import is_shard, sharded_like, whole
from flatout.models.weights import layers_of, own_names

# Gets a layer's name and kind, its inputs and its output.
Look = Callable[[str, str, tuple[Any, ...], Any], None]


class TorchModel:
    """A model, in the ways in which frameworks differ.

    Attributes:
        module: the user's own object.
        rewrites_round: whether rewrites give the layers' results to rounding only.
        meets_in_loss: whether its loss may wait for other ranks' in each batch.
        is_compiled: whether it has its own loss, metrics and optimizer.
        framework: that it is written in.
        calls_hooks: whether calls of its parts go through torch's hooks.
        endings: of the files that it is saved as, of which the framework itself writes `own_files`.
        saved_as: the same in words.
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
        """The model as a function of a batch's inputs."""
        return self.module

    def outputs(self, inputs: Any, *, as_written: bool = False) -> Any:
        """What forward gives for a batch's inputs, past the model's own hooks.

        Args:
            inputs: a tensor, a tuple, or a mapping by argument.
            as_written: by the forward of its class, though a rewrite is on the model.
        """
        forward = forward_as_written(self.module) if as_written else None
        forward = forward or self.module.forward
        if torch.is_tensor(inputs):
            return forward(inputs)
        return forward(**inputs) if isinstance(inputs, Mapping) else forward(*inputs)

    def parts(self) -> dict[str, Any]:
        """Each part whose calls can be told apart, by its name; not the model itself."""
        named = self.module.named_modules()
        return {name: part for name, part in named if part is not self.module}

    def scales_images(self) -> bool | None:
        """Whether a layer scales or normalizes images; None where only trying would show."""

    def takes_channels_last(self) -> bool:
        """Whether its images are of shape (size, height, width, channels)."""
        return False

    def is_batch_coupled(self) -> bool:
        """Whether a sample's result depends on the other samples of its (micro-)batch."""
        return any(
            isinstance(m, _BatchNorm) and (m.training or not m.track_running_stats)
            for m in self.module.modules()
        )

    def draws_random(self) -> bool:
        """Whether a training step draws random numbers inside the model."""
        return any(
            (isinstance(m, _DropoutNd) and m.p > 0)
            or isinstance(m, nn.RReLU)
            or (isinstance(m, (nn.RNNBase, nn.MultiheadAttention)) and m.dropout > 0)
            for m in self.module.modules()
        )

    def is_partly_frozen(self) -> bool:
        """Whether some of its layers do not train."""
        return not all(parameter.requires_grad for parameter in self.module.parameters())

    def rewrites(self) -> list[Rewrite]:
        """What would run with less memory traffic. Looks only; changes nothing."""
        return rewrites_of(self.module)

    def weights(self) -> dict[str, torch.Tensor]:
        """Everything that is saved of the model, by name; the tensors themselves.

        Where each rank holds a part, all call it, and get whole tensors.
        """
        state = self.module.state_dict()
        own = own_names(self.module, state)
        return {own[name]: whole(value) for name, value in state.items()}

    def replicated(self) -> dict[str, torch.Tensor]:
        """Those weights of which each rank has all."""
        state = self.module.state_dict()
        own = own_names(self.module, state)
        return {own[name]: value for name, value in state.items() if not is_shard(value)}

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Put into the model what `weights` gave; names and shapes have been checked."""
        state = self.module.state_dict()
        own = own_names(self.module, state)
        # What another rank has is on the meta device here.
        values = {name: value for name, value in state.items() if not value.is_meta}
        self.module.load_state_dict(
            {name: sharded_like(weights[own[name]], value) for name, value in values.items()},
            strict=len(values) == len(state),
        )

    def parameters(self) -> list[torch.Tensor]:
        """What a step may change of the model, but for its buffers."""
        return list(self.module.parameters())

    def untrained(self) -> list[torch.Tensor]:
        """What a forward may change of the model."""
        return list(self.module.buffers())

    def layers(self) -> list[tuple[str, Any]]:
        """Each part of the model whose calls can be watched, by its own name."""
        return layers_of(self.module)

    def named(self) -> list[tuple[str, nn.Module]]:
        """Each layer by the name that the user knows it by."""
        return layers_of(self.module)

    def hold(self, layers: Iterable[nn.Module]) -> None:
        """Let layers and all inside them neither train nor act as in training."""
        for layer in layers:
            hold.hold(layer)

    def hold_until(self, last: nn.Module) -> None:
        """The same for a layer and all that it depends on."""
        paths = {id(module): path for path, module in self.module.named_modules()}
        hold.hold_until(self.module, paths[id(last)]) if paths[id(last)] else hold.hold(last)

    def release(self, layers: Iterable[nn.Module], *, batch_norm: bool) -> None:
        """Let layers and all inside them train again, BatchNorm only where that is asked for."""
        parts = {id(part): part for layer in layers for part in layer.modules()}
        for part in parts.values():
            if batch_norm or not hold.keeps_statistics(part):
                hold.release(part)
        for outer in self.module.modules():
            if any(id(part) in parts for part in outer.modules()) and id(outer) not in parts:
                hold.follow(outer)

    def frozen(self, layers: Iterable[nn.Module], *, batch_norm: bool) -> list[torch.Tensor]:
        """The parameters that `release` may let train."""
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
        """Have `look` called after each call of a layer, until `watches` is closed."""

        def hook(name: str, module: nn.Module) -> Callable[..., None]:
            kind = type(module).__name__
            return lambda _module, inputs, output: look(name or "model", kind, inputs, output)

        for name, module in self.layers():
            watches.callback(module.register_forward_hook(hook(name, module)).remove)

    def tables(self) -> Iterator[tuple[str, nn.Module, int]]:
        """Name, module and rows of each embedding table."""
        for name, module in self.layers():
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
                yield name, module, module.num_embeddings

    def first_layer(self) -> str:
        """The first layer with parameters, in words."""
        for name, module in self.module.named_modules():
            if next(module.parameters(recurse=False), None) is not None:
                own = own_names(self.module, [name])[name]
                return f"first layer {own or 'itself'} is {module}"
        return f"{type(self.module).__name__} without parameters"

    def structure(self) -> str:
        """Its layers and options as text: two models with the same text compute the same."""
        return repr(self.module)

    def lines(self, parts: Iterable[nn.Module] | None = None) -> dict[str, str]:
        """Each layer: its class, what it was made with, and the user's code in it.

        Args:
            parts: which layers; None for all.
        """
        own = None if parts is None else set(map(id, parts))
        layers = [layer for layer in self.layers() if own is None or id(layer[1]) in own]
        return {name or "the model": _module_words(module) for name, module in layers}


def uses_convolution(model: nn.Module) -> bool:
    """Whether the model has 2-D convolutions, which care for the memory format."""
    return any(isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)) for m in model.modules())


def _module_words(module: nn.Module) -> str:
    words = f"{type(module).__qualname__}({arguments_words(module)})"
    if not is_library(type(module)):
        words += f" code {code_digest(module)[:8]}"
    fixed = [n for n, p in module.named_parameters(recurse=False) if not p.requires_grad]
    return f"{words}, not trained: {', '.join(fixed)}" if fixed else words
