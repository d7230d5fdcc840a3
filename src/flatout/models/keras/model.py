"""The adapter for Keras models, and the reasons why a model cannot be trained here.

No module imports Keras before the user has imported it, because Keras chooses its backend at that
moment.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from functools import wraps
from types import FunctionType, ModuleType
from typing import Any

import torch

from flatout.data import Features
from flatout.errors import ModelError
from flatout.models.applied_cut import applied
from flatout.models.keras import hold
from flatout.models.keras.facts import layer_lines
from flatout.models.keras.layers import modules_of, replace_call
from flatout.models.keras.rewrites import keras_calls, put_on, training_step
from flatout.models.rewrites import Rewrite
from flatout.models.shards import is_shard, own_part, sharded_like, whole
from flatout.models.torch_model import Look, TorchModel

_NUMBER = re.compile(r"_\d+$")
_FOREIGN = {"tensorflow": "TensorFlow", "jax": "JAX"}


class KerasModel(TorchModel):
    """A `keras.Model` on the torch backend."""

    own_files = (".keras", ".weights.h5")
    endings = (*own_files, ".safetensors")
    saved_as = "a Keras model is saved as .keras (all of it), .weights.h5 or .safetensors (weights)"
    rewrites_round = True
    meets_in_loss = True
    framework = "Keras"
    calls_hooks = False

    @property
    def is_compiled(self) -> bool:  # type: ignore[override]
        return bool(self.module.compiled)

    def check(self) -> None:
        keras: Any = sys.modules["keras"]
        backend = keras.backend.backend()
        if backend != "torch":
            raise ModelError(
                f"Keras runs on {backend} in this process, and Flatout trains on Keras' torch "
                "backend",
                do="set KERAS_BACKEND=torch before Keras is imported: in the shell, by "
                "os.environ['KERAS_BACKEND'] = 'torch' at the top of the script, or by starting it "
                "with `flatout run`. A .keras file that another backend saved loads there as it is",
            )
        for layer in self.module._flatten_layers():
            result = next(_foreign_calls(layer), None)
            if result is not None:
                words, where = result
                raise ModelError(
                    f"layer {layer.name!r} ({type(layer).__name__}) calls {words}, which torch "
                    "cannot differentiate",
                    where=where,
                    do="write it with keras.ops, which run on every backend",
                )
        if not self.is_compiled and not self.module.built:
            raise ModelError(
                "the Keras model is not built, so it has no weights to train yet",
                do="give it an Input layer, call it once on a batch, or compile it: then the first "
                "batch builds it",
            )

    def called(self, *, training: bool) -> Any:
        return _Called(self.module, training=training)

    def outputs(self, inputs: Any, *, as_written: bool = False) -> Any:
        model = self.module
        training = {"training": model.training} if model._call_has_training_arg else {}
        return model(inputs, **training)

    def parts(self) -> dict[str, Any]:
        parts: dict[str, Any] = {}
        for layer in self.module._flatten_layers(include_self=False):
            name = layer.name
            while name in parts:
                name += "+"
            parts[name] = layer
        return parts

    def scales_images(self) -> bool:
        keras: Any = sys.modules["keras"]
        kinds = (keras.layers.Rescaling, keras.layers.Normalization)
        return any(isinstance(layer, kinds) for layer in self.module._flatten_layers())

    def takes_channels_last(self) -> bool:
        keras: Any = sys.modules["keras"]
        formats = (getattr(layer, "data_format", None) for layer in self.module._flatten_layers())
        own = next((format for format in formats if format is not None), None)
        return bool((own or keras.config.image_data_format()) == "channels_last")

    def is_batch_coupled(self) -> bool:
        return any(
            type(layer).__name__ == "BatchNormalization" and layer.trainable
            for layer in self.module._flatten_layers()
        )

    def draws_random(self) -> bool:
        return any(layer._seed_generators for layer in self.module._flatten_layers())

    def rewrites(self) -> list[Rewrite]:
        calls = keras_calls(self.module)
        words = f"{len(calls)} Keras layers call torch's operators directly"
        return [Rewrite(words, lambda: put_on(self.module, calls))] if calls else []

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: whole(value) for name, value in keras_values(self.module).items()}

    def replicated(self) -> dict[str, torch.Tensor]:
        values = keras_values(self.module)
        return {name: value for name, value in values.items() if not is_shard(value)}

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        for name, variable in _variables(self.module).items():
            value = variable.value
            own_part(value).copy_(own_part(sharded_like(weights[name], value)))

    def parameters(self) -> list[torch.Tensor]:
        return [variable._value for variable in _all_variables(self.module)]

    def untrained(self) -> list[torch.Tensor]:
        return [*super().untrained(), *(p for p in self.parameters() if not p.requires_grad)]

    def is_partly_frozen(self) -> bool:
        layers = self.module._flatten_layers()
        return any(layer.weights and not layer.trainable for layer in layers)

    def layers(self) -> list[tuple[str, Any]]:
        own = [(layer.name, layer) for layer in self.module._flatten_layers()]
        return [*self.module.named_modules(), *own]

    def named(self) -> list[tuple[str, Any]]:
        return [(layer.name, layer) for layer in self.module._flatten_layers()]

    def hold(self, layers: Iterable[Any]) -> None:
        for layer in layers:
            hold.hold(layer)

    def hold_until(self, last: Any) -> None:
        self.hold(list(hold.before(self.module, last)))

    def release(self, layers: Iterable[Any], *, batch_norm: bool) -> None:
        hold.release(self.module, layers, batch_norm=batch_norm)

    def frozen(self, layers: Iterable[Any], *, batch_norm: bool) -> list[torch.Tensor]:
        result = hold.frozen(self.module, layers, batch_norm=batch_norm)
        return [variable._value for variable in result]

    def watch(self, look: Look, watches: ExitStack) -> None:
        for layer in self.module._flatten_layers(include_self=False):
            watches.callback(replace_call(layer, _watched(layer, look)))

    def tables(self) -> Iterator[tuple[str, Any, int]]:
        for layer in modules_of(self.module):
            kind = next((k for k in type(layer).__mro__ if k.__name__ == "Embedding"), None)
            if kind is not None and kind.__module__.startswith("keras."):
                yield layer.name, layer, layer.input_dim

    def first_layer(self) -> str:
        for layer in self.module._flatten_layers(include_self=False):
            if layer.weights:
                shape = tuple(layer.weights[0].shape)
                return f"first layer {layer.name} is {type(layer).__name__} with weights {shape}"
        return f"{self.module.name} without weights"

    def structure(self) -> str:
        try:
            return str(self.module.to_json())
        except Exception:
            kinds = [type(layer).__qualname__ for layer in self.module._flatten_layers()]
            return " ".join([type(self.module).__qualname__, *kinds])

    def lines(self, parts: Iterable[Any] | None = None) -> dict[str, str]:
        return layer_lines(self.module, parts)


class _Called:
    """A model as a function of a batch's inputs."""

    def __init__(self, model: Any, *, training: bool) -> None:
        self._model = model
        self._training = training

    def parameters(self) -> Any:
        return self._model.parameters()

    def __call__(self, *parts: Any, **named: Any) -> Any:
        inputs = named or (parts[0] if len(parts) == 1 else parts)
        with training_step() if self._training else nullcontext():
            return call(self._model, inputs, training=self._training)


def call(model: Any, inputs: Any, *, training: bool) -> Any:
    """Return the model's outputs for a batch's inputs, or for features in their place."""
    if isinstance(inputs, Features):
        return applied[model].rest(inputs)
    return model(inputs, training=training) if model._call_has_training_arg else model(inputs)


def _foreign_calls(layer: Any) -> Iterator[tuple[str, str]]:
    functions = [
        function
        for cls in type(layer).__mro__
        if not cls.__module__.startswith(("keras.", "torch.", "builtins"))
        for function in vars(cls).values()
        if isinstance(function, FunctionType)
    ]
    own = getattr(layer, "function", None)  # the user's function in a Lambda layer
    if isinstance(own, FunctionType):
        functions.append(own)
    for function in functions:
        yield from _foreign_calls_in(function)


def _foreign_calls_in(function: FunctionType) -> Iterator[tuple[str, str]]:
    try:
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return  # no source: typed at a prompt, or a lambda within a call
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        root = node.value
        while isinstance(root, ast.Attribute):
            root = root.value
        if not isinstance(root, ast.Name):
            continue
        framework = _framework(function.__globals__.get(root.id))
        if framework is not None:
            where = f"{inspect.getsourcefile(function)}:{first + node.lineno - 1}"
            yield f"{ast.unparse(node)} of {framework}", where


def _framework(value: object) -> str | None:
    if not isinstance(value, ModuleType):
        return None
    return _FOREIGN.get(value.__name__.partition(".")[0])


# Names of the methods that Keras' fit, evaluate and predict consist of. The user's class may
# override any of these methods.
_METHODS = {
    "fit": ("fit", "make_train_function", "train_step"),
    "evaluate": ("evaluate",),
    "test": ("make_test_function", "test_step"),
    "predict": ("predict",),
    "predict_step": ("make_predict_function", "predict_step"),
}


def own_method(model: Any, verb: str) -> str:
    """Return the first method of fit, evaluate or predict that the class overrides, or ""."""
    names = _METHODS[verb]
    return next((name for name in names if is_overridden(model, name)), "")


def is_overridden(model: Any, name: str) -> bool:
    return not getattr(type(model), name).__module__.startswith("keras.")


def _watched(layer: Any, look: Look) -> Callable[..., Any]:
    call = layer.call

    @wraps(call)
    def watched(*inputs: Any, **options: Any) -> Any:
        output = call(*inputs, **options)
        look(layer.name, type(layer).__name__, inputs, output)
        return output

    return watched


def keras_values(model: Any) -> dict[str, torch.Tensor]:
    """Return weights, statistics, seeds and states by name, in Keras' order; shards as they are."""
    return {name: variable.value.detach() for name, variable in _variables(model).items()}


def _all_variables(model: Any) -> list[Any]:
    listed = [variable for variable in model.variables if variable._value is not None]
    known = {id(variable) for variable in listed}
    states = [
        state
        for layer in model._flatten_layers()
        for state in _flat(getattr(layer, "states", None))
        if hasattr(state, "assign") and id(state) not in known
    ]
    return [*listed, *states]


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from _flat(part)
    elif value is not None:
        yield value


def _variables(model: Any) -> dict[str, Any]:
    metrics = {id(v) for metric in model.metrics for v in metric.variables}
    result: dict[str, list[str]] = {}
    named: dict[str, Any] = {}
    for variable in _all_variables(model):
        if id(variable) in metrics:
            continue
        *layers, own = variable.path.split("/")
        if layers and layers[0] == model.name:
            layers = layers[1:]
        counted = [_counted(layer, depth, result) for depth, layer in enumerate(layers)]
        name = "/".join([*counted, own])
        # A layer may hold several variables of the same name.
        while name in named:
            name += "+"
        named[name] = variable
    return named


def _counted(layer: str, depth: int, seen: dict[str, list[str]]) -> str:
    base = _NUMBER.sub("", layer)
    known = seen.setdefault(f"{depth} {base}", [])
    if layer not in known:
        known.append(layer)
    number = known.index(layer)
    return f"{base}_{number}" if number else base
