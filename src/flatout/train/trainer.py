"""Trainer: fit, evaluate, predict, save and load a model, each a file beside this one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from flatout.console import rounded, say
from flatout.data.batch import Batch, rows, to
from flatout.data.pipeline import Pipeline
from flatout.data.source import Source, as_source
from flatout.data.sources.array_parts import with_parts
from flatout.data.sources.arrays import Arrays
from flatout.devices import place, resolve_device
from flatout.errors import CheckpointError, DataError, ModelError
from flatout.models import load_weights, weights_of
from flatout.models.keras_model import is_keras
from flatout.optim import Lamb, Lars, LrRule
from flatout.recipe import Recipe, ResolvedRecipe
from flatout.save.fits import check_fits
from flatout.save.foreign import read_weights_of
from flatout.save.weights_file import check_ending, load_weights_file, save_weights
from flatout.train import guard
from flatout.train.callbacks import Callback, Progress
from flatout.train.class_weight import ClassWeight
from flatout.train.compute import call
from flatout.train.evaluate import evaluate
from flatout.train.fit import Fit
from flatout.train.history import History
from flatout.train.image_files import files_as_images
from flatout.train.inputs import Inputs
from flatout.train.job import Job, TorchJob, metrics_of
from flatout.train.job_facts import Facts, fact, losses_facts, metrics_fact
from flatout.train.loop import Loop
from flatout.train.losses import Loss, as_loss
from flatout.train.metrics import Given
from flatout.train.narrow import Narrow
from flatout.train.notebook import check_ranks_asked, on_ranks
from flatout.train.predict import predict
from flatout.train.several_losses import SeveralLosses, check_names
from flatout.train.signature import (
    Signature,
    as_classes,
    check_bytes,
    learned,
    met,
    renumbered_words,
    resized_words,
    schema_of_images,
    trained,
    words_of,
)
from flatout.train.takes import takes
from flatout.train.warm_start import warm_start as start_warm
from flatout.world import World

_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "rmsprop": torch.optim.RMSprop,
    "lars": Lars,
    "lamb": Lamb,
}


# Evaluation keeps no activations, so larger batches than in training are safe and faster.
_EVALUATION_BATCH = 256


class Trainer:
    """Trains a `torch.nn.Module` as fast as this machine allows, with the same result.

        trainer = flatout.Trainer(model, loss="cross_entropy", metrics=["accuracy"])
        history = trainer.fit((x, y), batch_size=64, epochs=5, validation_data=(xv, yv))
        trainer.save("model.safetensors")

    Args:
        model: the user's own object; it holds the trained weights afterwards.
        loss: a standard name (cross_entropy, nll, binary_cross_entropy, mse, mae, huber), a torch
            loss, or a callable `(output, target)` giving a mean or (sum, weight). Of a model of
            several outputs: a dict of such, by the output's name (or, for a tuple, in its order).
        loss_weights: of several losses what each is multiplied by in the total, by name; 1 where
            none is given.
        optimizer: an optimizer, its class, a callable taking the parameters, or a name (adam,
            adamw, sgd, rmsprop; lars, lamb for very large batches).
        lr: learning rate, for a class or name; None leaves the class's own default.
        lr_rule: a `flatout.LrRule`: how the rate follows the global batch, where it was found with
            another one; None leaves it as it is.
        metrics: names (accuracy, auc, mse, mae), torchmetrics objects or callables; a list, or a
            mapping by name. With several losses: such a list or mapping for each output, by name.
        scheduler: a torch scheduler, or a callable that takes the optimizer and gives one.
        schedule_every: "step" or "epoch": when the scheduler steps. ReduceLROnPlateau always
            steps by epoch, on `val_loss` or, without validation, `loss`.
        recipe: requested settings; what is left open is decided by measuring.
        allow: how far the result may differ from the plain job: "exact" (bit-identical),
            "tolerant" (rounding), "redrawn" (other random draws).
        accumulate: batches whose gradients make one optimizer step.
        clip_norm: largest total 2-norm of the gradients, or None.
        clip_value: largest absolute gradient element, or None.
        seed: decides the sample order, together with epoch and sample number.
        run: folder or fsspec URL for checkpoints and the log; None writes nothing.
        warm_start: a run, checkpoint or model file whose weights and optimizer state to start
            from; step count and schedule start anew.
        devices: ranks that `fit` trains on, in a notebook: processes that are spawned for it, after
            which this model holds the weights. 1 takes the ranks that `flatout run` has started.
        say: prints the decisions made for the user; `lambda line: None` for silence.

    Raises:
        ModelError: for a model, loss, optimizer or metric that cannot be used.
        WorldError: for devices that are not here, or are for `flatout run` to start.
    """

    # What the model knows of its data, and what is to be said of these; see `classes`.
    signature: Signature | None = None
    input_lines: Sequence[str] = ()

    def __new__(cls, model: Any = None, **arguments: Any) -> Trainer:
        """A Keras model gets the Trainer that knows Keras' words, or at least how to call it."""
        if cls is Trainer and is_keras(model):
            from flatout.train import keras_trainer, keras_uncompiled

            compiled = keras_trainer.KerasTrainer
            uncompiled = keras_uncompiled.UncompiledKerasTrainer
            return super().__new__(compiled if model.compiled else uncompiled)
        return super().__new__(cls)

    def __init__(
        self,
        model: nn.Module,
        *,
        loss: Any = "cross_entropy",
        optimizer: Any = torch.optim.Adam,
        lr: float | None = None,
        loss_weights: Mapping[str, float] | None = None,
        metrics: Iterable[Given] | Mapping[str, Any] = (),
        scheduler: Any = None,
        schedule_every: str = "step",
        recipe: Recipe | ResolvedRecipe | None = None,
        allow: str = "tolerant",
        accumulate: int = 1,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        lr_rule: LrRule | None = None,
        seed: int = 0,
        run: str | Path | None = None,
        warm_start: str | Path | None = None,
        devices: int = 1,
        say: Callable[[str], None] = say,
    ) -> None:
        check_ranks_asked(devices)
        self.devices = devices
        if not isinstance(model, nn.Module):
            raise ModelError(
                f"a model is a torch.nn.Module, found {type(model).__name__}",
                do="pass the module itself, not a function or a state dict",
            )
        if schedule_every not in ("step", "epoch"):
            raise ModelError(f"schedule_every is 'step' or 'epoch', found {schedule_every!r}")
        self.model = model
        self.loss = _as_losses(loss, loss_weights)
        self.metrics = metrics
        # An unknown name is an error here, not after the first epoch.
        metrics_of(self.loss, metrics)
        self.optimizer = _as_optimizer(optimizer, model, lr)
        self.scheduler = _as_scheduler(scheduler, self.optimizer)
        self.schedule_every = schedule_every
        self.seed = seed
        self._loop_arguments: dict[str, Any] = {
            "recipe": recipe,
            "allow": allow,
            "accumulate": accumulate,
            "clip_norm": clip_norm,
            "clip_value": clip_value,
            "lr_rule": lr_rule,
            "seed": seed,
            "run": run,
            "say": say,
        }
        self.get_ready()
        if warm_start is not None:
            words, signature = start_warm(model, self.optimizer, warm_start)
            self.signature = signature or self.signature
            say(words)

    def get_ready(self) -> None:
        """Begin with nothing fitted."""
        self.history: History | None = None
        self._fit: Fit | None = None
        self._class_weight: Any = None
        self._said: set[str] = set()
        self.loop = Loop(**self._loop_arguments)

    def __repr__(self) -> str:
        parts = [f"{type(self.model).__name__} of {_weights(self.model)}"]
        if self.optimizer is not None:
            rates = dict.fromkeys(rounded(group["lr"], 6) for group in self.optimizer.param_groups)
            own = getattr(self.optimizer, "keras", self.optimizer)
            parts.append(f"{type(own).__name__}, lr {', '.join(rates)}")
        return f"<{type(self).__name__}: {', '.join(parts)}>"

    @on_ranks
    def fit(
        self,
        x: Any,
        y: Any = None,
        *,
        batch_size: int | None = None,
        epochs: int = 1,
        shuffle: bool = True,
        drop_last: bool = False,
        validation_data: Any = None,
        validation_batch_size: int | None = None,
        validation_split: float = 0.0,
        class_weight: Mapping[Any, Any] | None = None,
        sample_weight: Any = None,
        callbacks: Iterable[Callback] = (),
        progress: bool | None = None,
        verbose: int | str = "auto",
        initial_epoch: int = 0,
        resume: bool | str = False,
    ) -> History:
        """Train until `epochs` epochs are done, and return what happened.

        Args:
            x: inputs (with `y`), an `(x, y)` or `(x, y, sample_weight)` tuple of arrays or
                tensors, a torch Dataset, DataLoader, any iterable of batches, or a source of
                `flatout.data`.
            y: targets, if they are not part of `x`.
            batch_size: samples per batch, for inputs that are not in batches already; 32 by
                default.
            epochs: the epoch number to reach; a resumed fit does what is missing.
            shuffle: a new order each epoch, a function of seed and epoch alone.
            drop_last: leave out a last batch that is not full.
            validation_data: evaluated after each epoch, as `val_...`.
            validation_batch_size: for validation; 256 by default.
            validation_split: the share of arrays, from 0 to 1, that is held out to validate on:
                the last of them as they are given, before any shuffling. `validation_data` wins.
            class_weight: weight by class number, 1 where none is named: each sample's weight in
                the loss of training is multiplied by that of its class. With several losses: by
                output.
            sample_weight: of arrays, shape (samples,): each sample's weight in the loss, which is
                divided by the sum of the weights.
            callbacks: see `flatout.Callback`.
            progress: True, False, or None: a bar on a terminal, otherwise a line a minute.
            verbose: the same in Keras' words: 0 for silence, 1 or "auto" for the bar, 2 for a line
                after each epoch alone.
            initial_epoch: the number of the first epoch, which decides the order of its samples
                and what is left until `epochs`; a resume goes on from its checkpoint instead.
            resume: True goes on from the newest checkpoint of `run`, if there is one; a name
                chooses a checkpoint.

        Returns:
            History: figures by epoch, step times, lanes, the settings that ran.

        Raises:
            DataError: for data that are empty, corrupt or do not fit the model.
            NumbersError: for a NaN or infinity; the weights are those from before it.
            OutOfMemory: where no allowed micro-batch fits.
            CheckpointError: where a checkpoint cannot be written or does not fit.
            Interrupted: after Ctrl-C or SIGTERM, when the checkpoint is written (exits 130 or 143).
        """
        share = 0.0 if validation_data is not None else validation_split
        x, y, held_out = with_parts(x, y, sample_weight, share)
        if held_out is not None:
            validation_data = held_out
        self._class_weight = _class_weights(class_weight, self.loss)
        source = as_source(
            x,
            y,
            batch_size=batch_size,
            shuffle=shuffle,
            seed=self.seed,
            drop_last=drop_last,
            workers=self.loop.requested.input.workers,
            pin_memory=self._pin_memory(),
        )
        validation = None
        if validation_data is not None:
            validation = self._in_order(validation_data, None, validation_batch_size)
        self.loop = Loop(**self._loop_arguments, resume=resume)
        source, validation = self.learn(source, validation)
        shown = progress_of(verbose) if progress is None else progress
        self._fit = Fit(
            self, source, validation, epochs, list(callbacks), shown, first_epoch(initial_epoch)
        )
        self.history = self._fit.state.history  # what there is of it, should fit end in an error
        return self._fit.run()

    def evaluate(
        self, x: Any, y: Any = None, *, batch_size: int | None = None, sample_weight: Any = None
    ) -> dict[str, float]:
        """Loss and metrics over all samples, each counted once; the model's modes are kept.

        Args:
            x: as `fit` takes it.
            y: targets, if they are not part of `x`.
            batch_size: samples per batch; 256 by default.
            sample_weight: as for `fit`, for the loss.

        Raises:
            NumbersError: if a weight or buffer is not finite.
        """
        x, y, _ = with_parts(x, y, sample_weight, 0.0)
        with self.met(self._in_order(x, y, batch_size)) as source:
            figures = self.evaluation(source)
        assert figures is not None
        return figures

    def predict(self, x: Any, *, batch_size: int | None = None) -> Any:
        """The model's outputs for all samples, in order, on the CPU.

        Args:
            x: what `evaluate` takes, targets or not; or the path of an image file, a list of them,
                or a folder of images, where the model was trained on `flatout.data.images`: they
                become its input as they did in training.
            batch_size: samples per batch.

        Returns:
            a tensor (or tuple or dict of tensors, as the model returns them) with one row per
            sample. `classes` names the classes by number.

        Raises:
            DataError: the data have classes that the model does not know, or the model does not
                know how a file becomes its input.
        """
        x = files_as_images(x, self.signature)
        with self.met(self._in_order(_inputs_only(x), None, batch_size)) as source:
            return predict(self, source)

    def save(self, path: str | Path) -> Path:
        """Write the weights under the model's own keys; the name's ending decides the format.

        Args:
            path: `.safetensors`, which has checksums, or `.pt` or `.pth`, which
                `torch.load(path, weights_only=True)` reads as a dict of tensors.

        Raises:
            NumbersError: if a weight or buffer is not finite.
            CheckpointError: for another ending, or if it cannot be written; an older file is then
                still whole.
        """
        check_ending(path)
        guard.check_state(self.model, "saving")
        world = self.world()
        if world.is_first:
            save_weights(path, weights_of(self.model), self.metadata())
        world.wait()  # so that whoever comes back from here finds the file
        return Path(path)

    def load(self, path: str | Path) -> None:
        """Load weights from a file into the model, in place; nothing in it is executed.

        Args:
            path: what `save` has written, or any safetensors file or torch.save's dict of tensors.

        Raises:
            CheckpointError: if the file is damaged, or of another model.
        """
        weights, metadata = load_weights_file(path)
        check_fits(weights_of(self.model), weights, where=str(path))
        signature = Signature.of(metadata, str(path))
        load_weights(self.model, weights)
        self.signature = signature or self.signature

    def load_best(self, run: str | Path | None = None) -> str:
        """Load a run's best weights into the model, in place; returns a line that names them.

        They are those of the checkpoint with the best score (`BestCheckpoint` gives one), or what
        `EarlyStopping` holds.

        Args:
            run: the run folder; by default this Trainer's own.

        Raises:
            CheckpointError: without a run folder, where nothing tells which weights are the best,
                or they are of another model.
        """
        folder = self.loop.run if run is None else run
        if folder is None:
            raise CheckpointError(
                "there is no run folder whose best weights could be loaded",
                do="Trainer(model, run=folder) writes one; or name one: load_best(folder)",
            )
        if run is None:
            self.loop.checkpoints.wait()
        self.world().wait()  # until the first rank has written what it writes
        found = read_weights_of(folder, "best")
        check_fits(weights_of(self.model), found.tensors, where=found.where)
        signature = Signature.of(found.metadata, found.where)
        load_weights(self.model, found.tensors)
        self.signature = signature or self.signature
        return f"best weights: {found.where}{f', {found.score}' if found.score else ''}"

    def save_checkpoint(self, score: float | None = None) -> str:
        """Write a checkpoint of everything into the run folder; returns its path.

        A callback may ask for one at any time: it is written once all callbacks had their turn.

        Args:
            score: the checkpoint with the smallest is kept beside the newest.

        Raises:
            CheckpointError: without a run folder, before the first fit, or if it cannot be written.
        """
        if self._fit is None and self.devices > 1:
            raise CheckpointError(
                "the ranks that have trained are gone, and with them what a checkpoint holds",
                do="give the Trainer a run folder: they write checkpoints while they train",
            )
        if self._fit is None:
            raise CheckpointError("there is nothing to save before the first fit")
        return self._fit.save_checkpoint(score)

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the classes by number, as of `predict`'s outputs; None where none are known.

        They come from the training data or the file that was loaded, and are saved with the model.
        Data that number them otherwise get these numbers. Set it to name the classes of arrays, or
        to None to let the next training data name them.
        """
        return None if self.signature is None else self.signature.classes

    @classes.setter
    def classes(self, names: Sequence[str] | None) -> None:
        found = None if names is None else as_classes(names)
        self.signature = replace(self.signature or Signature(), classes=found)

    @property
    def resolved(self) -> ResolvedRecipe | None:
        """How the steps of the latest fit ran, with reasons; None before it."""
        return self.loop.resolved

    def _in_order(self, x: Any, y: Any, batch_size: int | None) -> Source:
        if batch_size is None and _comes_in_samples(x):
            batch_size = _EVALUATION_BATCH
        return as_source(
            x,
            y,
            batch_size=batch_size,
            shuffle=False,
            seed=self.seed,
            workers=self.loop.requested.input.workers,
            pin_memory=self._pin_memory(),
            clip_batch=True,
        )

    def _pin_memory(self) -> bool:
        return self.loop.requested.input.pin_memory != "off"

    # -- what fit, evaluate and predict ask for; another framework's models answer otherwise ------

    def learn(self, source: Source, validation: Source | None) -> tuple[Source, Source | None]:
        """Take from training data what the model is to know, and give what fit is to read."""
        source = self._agreed(source)
        before = self.signature
        self.signature = learned(source, before, self.takes_bytes)
        try:
            train = trained(source, self.signature)
            checked = None if validation is None else met(validation, self.signature)
            if checked is not None:
                check_bytes(checked, self.signature, self.takes_bytes)
        except DataError:
            self.signature = before
            raise
        self.loop.inputs = self._inputs(self.signature, train, checked)
        self.loop.metadata = self.metadata()
        lines = [words_of(self.signature, source), renumbered_words(source, train)]
        if validation is not None and checked is not None:
            found = (renumbered_words(validation, checked), resized_words(self.signature, checked))
            lines += [None if words is None else f"validation: {words}" for words in found]
        self.input_lines = [line for line in lines if line is not None]
        return train, checked

    @contextmanager
    def met(self, source: Source) -> Iterator[Source]:
        """Data to evaluate or predict, with what the model knows of those it was trained on.

        Within, batches become the model's input as these data want it: a callback may evaluate
        others than those that are trained on.
        """
        source = self._agreed(source)
        signature = self.signature
        if signature is None:
            signature = learned(source, None, self.takes_bytes)
        found = met(source, signature)
        check_bytes(found, signature, self.takes_bytes)
        for words in (renumbered_words(source, found), resized_words(signature, source)):
            if words is not None:
                self.loop.say(f"input: {words}")
        before, self.loop.inputs = self.loop.inputs, self._inputs(signature, found)
        try:
            yield found
        finally:
            self.loop.inputs = before

    def _agreed(self, source: Source) -> Source:
        """The source, of which batches can be looked at: all ranks know how many there are."""
        world = self.world()  # from here on the first rank speaks for all
        return source.agreed(world.gather) if isinstance(source, Pipeline) else source

    def metadata(self) -> dict[str, str]:
        """What goes with the weights into a file."""
        return {} if self.signature is None else self.signature.metadata()

    def _inputs(self, signature: Signature, *sources: Source | None) -> Inputs:
        """What becomes of these sources' images on the device."""
        last = self.takes_channels_last()
        schemas = [schema_of_images(s) for s in sources if isinstance(s, Pipeline)] if last else []
        shapes = frozenset(schema["image"].shape for schema in schemas if schema is not None)
        return Inputs(signature.pixels, last, shapes)

    def takes_bytes(self, batch: Batch) -> bool:
        """Whether the model computes with bytes as they are, because it scales them itself."""
        return takes(self.model, rows(batch, 0, 2))

    def takes_channels_last(self) -> bool:
        """Whether the model takes images as (size, height, width, channels)."""
        return False

    def job(self, source: Source | None, *, training: bool) -> Job:
        """Forward, loss and fresh metrics, to train or to evaluate.

        Args:
            source: all of whose labels are looked at with the first batch; None for none.
            training: whether it is trained on.
        """
        return TorchJob(
            self.model,
            self.loss,
            self.metrics,
            unweighted=training and counts_all(self.loss, source),
            class_weight=self._class_weight if training else None,
            say=self._say_once,
            source=source,
        )

    def _say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self.loop.say(line)

    def facts(self) -> Facts:
        """What tells this Trainer's job from others, for a resume to compare."""
        return {
            **losses_facts(self.loss),
            "metrics": metrics_fact(metrics_of(self.loss, self.metrics)),
            "class_weight": fact(_class_weight_words(self._class_weight)),
            "schedule_every": fact(self.schedule_every if self.scheduler is not None else "none"),
        }

    def evaluation(
        self, source: Source, stopped: Callable[[], bool] = lambda: False
    ) -> dict[str, float] | None:
        """Loss and metrics over `source`; None where `stopped` said so."""
        return evaluate(self, source, stopped)

    def validates(self, epoch: int) -> bool:
        """Whether to validate after this epoch."""
        return True

    def output(self, inputs: Any) -> Any:
        """What the model gives for a batch's inputs, in evaluation."""
        return call(self.model, Narrow(self.model, self._say_once).inputs(inputs))

    def world(self) -> World:
        """The ranks that this job runs on; joins them where fit has not done so."""
        return self.loop.join()

    def be_ready(self) -> None:
        """Place a model that has not been fitted yet."""
        if self.resolved is None:
            asked = self.loop.requested.world
            strict = asked.placement == "strict"
            self._device, why = resolve_device(asked.device, strict)
            if asked.device not in ("auto", str(self._device), self._device.type):
                self.loop.say(f"running on {self._device} {why}")
            for line in place(self.model, self._device, strict=strict).words_of_fallbacks():
                self.loop.say(line)

    def ready(self, batch: Batch) -> Batch:
        """The batch on the model's device, laid out as training resolved to."""
        if self.resolved is not None:
            return self.loop.ready(batch)
        return self.loop.inputs(to(batch, self._device))

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision that training resolved to; plain before the first fit."""
        return nullcontext() if self.resolved is None else self.loop.autocast()


def counts_all(loss: Loss | SeveralLosses, source: Source | None) -> bool:
    """Whether it is known that no target is one that the loss ignores."""
    labels = None if source is None else source.labels_range()
    if labels is None or isinstance(loss, SeveralLosses):
        return False
    return loss.ignore_index is None or not labels[0] <= loss.ignore_index <= labels[1]


def _as_losses(loss: Any, weights: Mapping[str, float] | None) -> Loss | SeveralLosses:
    if isinstance(loss, Mapping):
        return SeveralLosses(loss, weights)
    if weights is not None:
        raise ModelError(
            "loss_weights are for several losses, and there is one",
            do='give a loss for each output: loss={"a": "cross_entropy", "b": "mse"}',
        )
    return as_loss(loss)


def _class_weights(given: Any, loss: Loss | SeveralLosses) -> Any:
    """As a `ClassWeight`, or one for each output that has some; None without any."""
    if given is None:
        return None
    if not isinstance(loss, SeveralLosses):
        return ClassWeight(given, loss)
    is_by_output = isinstance(given, Mapping) and all(
        isinstance(weights, Mapping) for weights in given.values()
    )
    if not is_by_output:
        raise ModelError(
            "with a loss for each output, class_weight is given by output too",
            do=f"write class_weight={{{next(iter(loss.parts))!r}: {{0: 1.0, 1: 5.0}}}}",
        )
    check_names("class_weight", given, loss.parts)
    return {name: ClassWeight(weights, loss.parts[name]) for name, weights in given.items()}


def progress_of(verbose: int | str) -> bool | Progress | None:
    """What Keras' `verbose` shows.

    Raises:
        ModelError: it is none of 0, 1, 2 and "auto".
    """
    if verbose not in (0, 1, 2, "auto"):
        raise ModelError(f"verbose is 0, 1, 2 or 'auto', found {verbose!r}")
    if verbose == 2:
        return Progress(bar=False, line_every=math.inf)
    return None if verbose else False


def first_epoch(number: int) -> int:
    """The number of a fit's first epoch, checked.

    Raises:
        ModelError: it is no number from 0 on.
    """
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ModelError(f"initial_epoch is the number of an epoch from 0 on, found {number!r}")
    return number


def _class_weight_words(weights: Any) -> str:
    if isinstance(weights, dict):
        return "; ".join(f"{name}: {one.words}" for name, one in weights.items())
    return "none" if weights is None else weights.words


def _as_optimizer(optimizer: Any, model: nn.Module, lr: float | None) -> torch.optim.Optimizer:
    if isinstance(optimizer, torch.optim.Optimizer):
        if lr is not None:
            raise ModelError(
                "lr was given beside an optimizer that has its own",
                do="pass the optimizer's class, or set lr where the optimizer is made",
            )
        return _checked(optimizer, model)
    if isinstance(optimizer, str):
        if optimizer not in _OPTIMIZERS:
            raise ModelError(
                f"unknown optimizer {optimizer!r}; known: {', '.join(_OPTIMIZERS)}",
                do="use one of these names, or pass a torch optimizer or its class",
            )
        optimizer = _OPTIMIZERS[optimizer]
    if not callable(optimizer):
        raise ModelError(
            f"an optimizer is an optimizer, its class or a name, found {type(optimizer).__name__}"
        )
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ModelError("the model has no parameter that can be trained")
    made = optimizer(parameters) if lr is None else optimizer(parameters, lr=lr)
    if not isinstance(made, torch.optim.Optimizer):
        raise ModelError(f"optimizer(...) gave a {type(made).__name__}, not a torch optimizer")
    return _checked(made, model)


def _checked(optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ModelError(
            "LBFGS evaluates the loss several times in one step, which no step here does",
            do="choose another optimizer, or train with a loop of plain PyTorch",
        )
    own = {id(p) for p in model.parameters()}
    if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
        raise ModelError(
            "the optimizer has no parameter of this model",
            do="make it from the parameters of the model that is passed here",
        )
    return optimizer


def _comes_in_samples(x: Any) -> bool:
    """Whether batches are ours to make: not for loaders, sources and iterables of batches."""
    if isinstance(x, Pipeline):
        return not x.in_batches
    return hasattr(x, "shape") or isinstance(x, (tuple, dict, Dataset, Arrays))


def _as_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer) -> Any:
    if isinstance(scheduler, type) or (callable(scheduler) and not hasattr(scheduler, "step")):
        scheduler = scheduler(optimizer)
    if scheduler is None:
        return None
    if not all(hasattr(scheduler, name) for name in ("step", "state_dict", "load_state_dict")):
        raise ModelError(
            f"a scheduler is one of torch's, or takes the optimizer and gives one, found "
            f"{type(scheduler).__name__}"
        )
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ModelError(
            "the scheduler belongs to another optimizer than this Trainer's",
            do="pass both objects, or a function that takes the optimizer and gives the scheduler",
        )
    return scheduler


def _inputs_only(x: Any) -> Any:
    """A tuple of arrays is one input of several parts here, not (x, y)."""
    return (x,) if isinstance(x, tuple) else x


def _weights(model: nn.Module) -> str:
    """How many weights a model has, and how many of them train, for people."""
    each = [(one.numel(), one.requires_grad) for one in model.parameters()]
    total, trained = sum(count for count, _ in each), sum(count for count, does in each if does)
    return f"{total:,} weights" + ("" if trained == total else f" ({trained:,} train)")
