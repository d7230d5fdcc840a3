"""A Keras model as torch modules, for code that hooks into calls and replaces parameters.

Keras' layers are torch modules too, but they read weights from Keras' variables, and each module
also lists the variables of all layers within. Here each layer gets a plain module as its companion,
with the layer's own weights as parameters. The layer runs within the call of this module, and its
variables return the present parameters of the module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from flatout.models.keras.layers import replace_call
from flatout.models.keras.tables import set_shape


class LayerModule(nn.Module):
    """The companion module of a layer.

    Attributes:
        read: for each variable of this module and of the modules inside: the variable, its module
            and the parameter's name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.read: list[tuple[Any, nn.Module, str]] = []

    def forward(self, call: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
        self.show()
        return call(*args, **options)

    def show(self) -> None:
        """Set the variables to the modules' present parameters."""
        for variable, module, name in self.read:
            variable._value = module._parameters[name]


class LayerModules:
    """The companion modules of a model.

    Args:
        model: a built `keras.Model`; it stays as it is until `open`.

    Attributes:
        root: the companion module of the model itself, which contains all other companion modules.
            Statistics, seeds and states, which Keras does not train, are in no companion module.
    """

    def __init__(self, model: Any) -> None:
        self._modules: dict[Any, LayerModule] = {}
        self._undo: list[Callable[[], None]] = []
        self.root = self._module_of(model)
        self._variables = {
            module._parameters[name]: variable for variable, module, name in self.root.read
        }

    def _module_of(self, layer: Any) -> LayerModule:
        self._modules[layer] = module = LayerModule()
        for variable in layer._trainable_variables:
            if variable._value is not None and variable._value.is_floating_point():
                name = _free(variable.name, module)
                module.register_parameter(name, variable._value)
                module.read.append((variable, module, name))
        for inner in layer._flatten_layers(include_self=False, recursive=False):
            # A layer that is used in several places of the model runs within the same companion
            # module.
            if inner not in self._modules:
                within = self._module_of(inner)
                module.add_module(_free(inner.name, module), within)
                module.read += within.read
        return module

    def open(self) -> None:
        """Run layers within the calls of their modules from now on."""
        for layer, module in self._modules.items():
            if module.read:
                self._undo.append(replace_call(layer, _within(module, layer.call)))

    def show(self) -> None:
        """Set all variables to the modules' present parameters, and adapt their shapes."""
        self.root.show()
        for variable, _, _ in self.root.read:
            set_shape(variable)

    def show_instead(self, others: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """Set variables to other tensors.

        Args:
            others: the tensors to set, by the parameter that the variable had when this object was
                made.
        """
        for parameter, other in others.items():
            variable = self._variables[parameter]
            variable._value = other
            set_shape(variable)

    def close(self) -> None:
        """Restore the layers' calls; the variables keep the modules' present parameters."""
        self.show()
        for undo in self._undo:
            undo()
        self._undo.clear()


def _free(name: str, module: nn.Module) -> str:
    name = name.replace(".", "_")
    while hasattr(module, name):
        name += "_"
    return name


def _within(module: LayerModule, call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def within(*args: Any, **options: Any) -> Any:
        given = _tensors_in((args, options))

        def run(*args: Any, **options: Any) -> Any:
            # Hooks may have replaced the tensors by tensors without Keras' masks.
            own = _tensors_in((args, options))
            _take_masks(own, given)
            output = call(*args, **options)
            _take_masks(given, own)  # attention removes masks
            return output

        output = module(run, *args, **options)
        module.show()  # hooks may have removed the parameters that they set for the call
        return output

    return within


def _tensors_in(arguments: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(arguments) if torch.is_tensor(leaf)]


def _take_masks(tensors: Sequence[Any], others: Sequence[Any]) -> None:
    for tensor, other in zip(tensors, others, strict=True):
        if tensor is not other:
            tensor._keras_mask = getattr(other, "_keras_mask", None)
