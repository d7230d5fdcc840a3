"""Trainer: the class that fits, evaluates, predicts with, saves and loads a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from torch import nn

from flatout.console import say
from flatout.data import Pipeline, Source, drawn_order
from flatout.errors import CheckpointError, DataError, ModelError
from flatout.models import adapter_of, load_weights, weights_of
from flatout.optim import LrRule, optimizer_adapter
from flatout.recipe import GivenRecipe, ResolvedRecipe, as_recipe
from flatout.save import check_ending, check_fits, load_model_file, read_weights_of, save_model_file
from flatout.train import guard
from flatout.train.callbacks import Progress
from flatout.train.fit import Fit
from flatout.train.history import History
from flatout.train.image_files import files_as_images
from flatout.train.inputs import Inputs
from flatout.train.keras.compiled import CompiledObjective
from flatout.train.largest_batch import check_is_open, largest_batch
from flatout.train.loop import Loop
from flatout.train.losses.metrics import Given
from flatout.train.model_ids import ModelIds, learn_ids, make_room
from flatout.train.notebook.notebook import check_ranks_asked, on_ranks
from flatout.train.objective import FitData, FitOptions, Objective
from flatout.train.part import Part
from flatout.train.run_folder import run_of_command
from flatout.train.signature import (
    Signature,
    as_classes,
    check_bytes,
    renumbered_words,
    resized_words,
    schema_of_images,
    signature_of,
    to_evaluate,
    trained,
    with_room,
    words_of,
)
from flatout.train.snapshot import random_state, set_random_state
from flatout.train.tables.tables import device_asserts_explained
from flatout.train.terms import TERMS
from flatout.train.worst import Worst, worst
from flatout.words import rounded
from flatout.world import World, comes_back, count_finished_fit, finished_fits


class Trainer:
    """Trains a `torch.nn.Module` as fast as this machine allows, with the same result.

        trainer = flatout.Trainer(model, loss="cross_entropy", metrics=["accuracy"])
        history = trainer.fit((x, y), batch_size=64, epochs=5, validation_data=(xv, yv))
        trainer.save("model.safetensors")

    Args:
        model: the user's own object; it holds the trained weights afterwards. A `keras.Model` on
            the torch backend is trained too; if it is compiled, its loss, metrics and
            optimizer are those of `compile`.
        loss: a standard name (cross_entropy, nll, binary_cross_entropy, mse, mae, huber), a torch
            loss, or a callable `(output, target)` giving a mean or (sum, weight). For a
            model with several outputs: a dict of losses by the output's name (for a tuple, in its
            order). "cross_entropy" by default.
        loss_weights: the factor of each loss in the total, by name, for several losses. A loss
            without a factor counts once.
        optimizer: an optimizer, its class, a callable taking the parameters, or a name (adam,
            adamw, sgd, rmsprop; lars, lamb for very large batches); "adam" by default.
        lr: learning rate, for a class or name; None leaves the class's own default.
        lr_rule: a `flatout.LrRule`, which scales a learning rate that was found with another
            global batch size. None leaves the learning rate unchanged.
        metrics: names (accuracy, auc, confusion, mse, mae), torchmetrics objects or callables; a
            list, or a mapping by name. With several losses: such a list or mapping for each
            output, by name.
        scheduler: a torch scheduler, or a callable that takes the optimizer and returns one.
        schedule_every: "step" or "epoch": the point at which the scheduler steps.
            ReduceLROnPlateau always steps by epoch.
        monitor: the figure that ReduceLROnPlateau follows, such as "val_accuracy". The default is
            `val_loss`, or `loss` without validation. The scheduler's mode must fit the figure.
        recipe: requested settings, or the path of their TOML file. Settings that are left open are
            decided by measuring.
        allow: the largest permitted difference from the plain job: "exact" (bit-identical),
            "tolerant" (rounding), "redrawn" (other random draws).
        accumulate: number of batches whose gradients are accumulated for an optimizer step.
        clip_norm: largest total 2-norm of the gradients, or None.
        clip_value: largest absolute gradient element, or None.
        parts: the user's own Parts, which act around each optimizer step (`flatout.Part`).
        seed: integer that, with epoch and sample index, decides the random order of samples.
        run: folder or fsspec URL for checkpoints and the log; None writes nothing.
        warm_start: a run, checkpoint or model file whose weights and optimizer state to start
            from. The step count and the schedule start again. Where the schema states ids, tables
            of the model get a row for each new id. `fit` reports the model's validation figures
            before training next to those after training.
        devices: number of ranks that `fit` trains on, in a notebook. `fit` spawns their processes,
            and this model holds the weights afterwards. With 1, `fit` uses the ranks that `flatout
            run` has started.
        say: prints the decisions made for the user; `lambda line: None` for silence.

    Raises:
        ModelError: for a model, loss, optimizer or metric that cannot be used. For a Keras model:
            Keras is on another backend than torch, or a layer calls another framework; on several
            ranks, a compiled model has its own `train_step`.
        WorldError: for devices that this machine lacks, or that `flatout run` has to start.
    """

    # Facts about the training data, such as names of classes; None before any are known.
    signature: Signature | None = None
    # Run folder from which the next fit resumes, after lost ranks have rejoined.
    _folder: str | None = None
    # Lines about the conversion of the input, which `fit` prints.
    input_lines: Sequence[str] = ()
    # Clocks, facts of the machine and limits that `auto` uses. Tests replace them.
    terms = TERMS

    def __init__(
        self,
        model: nn.Module,
        *,
        loss: Any = None,
        optimizer: Any = None,
        lr: float | None = None,
        loss_weights: Mapping[str, float] | None = None,
        metrics: Iterable[Given] | Mapping[str, Any] = (),
        scheduler: Any = None,
        schedule_every: str | None = None,
        monitor: str | None = None,
        recipe: GivenRecipe | None = None,
        allow: str = "tolerant",
        accumulate: int = 1,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        lr_rule: LrRule | None = None,
        parts: Sequence[Part] = (),
        seed: int = 0,
        run: str | Path | None = None,
        warm_start: str | Path | None = None,
        devices: int = 1,
        say: Callable[[str], None] = say,
    ) -> None:
        recipe = as_recipe(recipe)
        check_ranks_asked(devices, recipe)
        self.devices = devices
        given: dict[str, Any] = {
            "loss": loss,
            "loss_weights": loss_weights,
            "optimizer": optimizer,
            "lr": lr,
            "metrics": metrics,
            "scheduler": scheduler,
            "schedule_every": schedule_every,
            "monitor": monitor,
        }
        self.objective: Objective
        if adapter_of(model).is_compiled:
            clip = {"clip_norm": clip_norm, "clip_value": clip_value}
            self.objective = CompiledObjective(model, devices, **given, **clip)
        else:
            self.objective = Objective(model, **given)
        self._run = run
        self._loop_arguments: dict[str, Any] = {
            "recipe": recipe,
            "allow": allow,
            "accumulate": accumulate,
            "clip_norm": clip_norm,
            "clip_value": clip_value,
            "lr_rule": lr_rule,
            "parts": parts,
            "seed": seed,
            "run": run,
            "say": say,
        }
        self.get_ready()
        self._is_warm = warm_start is not None
        if warm_start is not None:
            self._know(self.objective.start_warm(warm_start, say))

    def get_ready(self) -> None:
        """Drop the state of earlier fits."""
        self.history: History | None = None
        self._fit: Fit | None = None
        self.loop = self._new_loop()

    def _new_loop(self, **own: Any) -> Loop:
        result = Loop(**self._loop_arguments | own)
        result.terms = self.terms
        return result

    @property
    def model(self) -> Any:
        """The user's own object."""
        return self.objective.model

    @property
    def optimizer(self) -> Any:
        """The optimizer; None before the first batch of a compiled Keras model."""
        return self.objective.optimizer

    @property
    def scheduler(self) -> Any:
        """The learning rate scheduler, or None."""
        return self.objective.scheduler

    def __repr__(self) -> str:
        parts = [f"{type(self.model).__name__} of {_weights(self.model)}"]
        if self.optimizer is not None:
            rates = dict.fromkeys(rounded(group["lr"], 6) for group in self.optimizer.param_groups)
            own = optimizer_adapter(self.optimizer).given
            parts.append(f"{type(own).__name__}, lr {', '.join(rates)}")
        return f"<{type(self).__name__}: {', '.join(parts)}>"

    @on_ranks
    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | Literal["auto"] | None = None,
        epochs: int = 1,
        verbose: int | str = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: Mapping[Any, Any] | Literal["balanced"] | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int | Collection[int] = 1,
        *,
        drop_last: bool = False,
        max_steps: int | None = None,
        progress: bool | None = None,
        resume: bool | str = False,
    ) -> History:
        """Train until `epochs` epochs are done, and return the History.

        A compiled Keras model trains as by `model.fit`, and `history.history` is as Keras' own.

        Args:
            x: inputs (with `y`), an `(x, y)` or `(x, y, sample_weight)` tuple of arrays or
                tensors, a torch Dataset, DataLoader, any iterable of batches, or a source of
                `flatout.data`. For a compiled Keras model: any data that `model.fit` takes, or a
                source; a tuple of arrays is (x, y) if the model is known to have one input.
            y: targets, if they are not part of `x`.
            batch_size: samples per batch, of all ranks, for inputs that are not in batches
                already; 32 by default. "auto" takes the largest batch whose step fits in memory,
                and finds it by trials before the first step. This changes what the model learns,
                and leaves the learning rate unchanged.
            epochs: the epoch number to reach; a resumed fit trains the missing epochs.
            verbose: `progress` in Keras' words: 0 for silence, 1 or "auto" for the bar, 2 for a
                line after each epoch alone.
            callbacks: objects that act during the fit (`flatout.Callback`). A compiled Keras model
                also takes Keras callbacks, in any order.
            validation_split: the fraction of the samples, from 0 to 1, that is held out to validate
                on: the last samples in the given order, before any shuffling. `x` must be arrays.
                `validation_data` takes precedence.
            validation_data: evaluated after each epoch, as `val_...`.
            shuffle: a new order each epoch, a function of seed and epoch alone.
            class_weight: weight by class number, 1 where none is named. Each sample's weight in
                the training loss is multiplied by the weight of its class. With several losses: by
                output. "balanced" counts the training data: samples / (classes * samples of the
                class), as in scikit-learn.
            sample_weight: each sample's weight in the loss, shape (samples,), for arrays. The loss
                is divided by the sum of the weights.
            initial_epoch: the number of the first epoch. It decides the order of the samples, and
                the number of epochs left until `epochs`. A resume continues from its checkpoint
                instead.
            steps_per_epoch: number of batches in an epoch. The next epoch continues with the next
                batch; data that end start again. With this number, an endless loader has epochs.
            validation_steps: number of batches in a validation, from the first batch each time.
            validation_batch_size: samples per batch of a validation; 256 by default, `batch_size`
                for a compiled Keras model.
            validation_freq: number of epochs from one validation to the next, or a list of the
                epochs to validate after, counted from 1.
            drop_last: leave out a last batch that is not full.
            max_steps: number of optimizer steps after which training ends, also within an epoch.
                Steps before a resume count. If `epochs` ends training earlier, a line reports it.
            progress: True, False, or None: a bar on a terminal, otherwise a line a minute.
            resume: True continues from the newest checkpoint of `run`, if there is one; a name
                chooses a checkpoint.

        Returns:
            History: figures by epoch, step times, lanes, the settings of the steps.

        Raises:
            DataError: for data that are empty, corrupt or do not fit the model.
            NumbersError: for a NaN or infinity; the model then has its weights from before it.
            OutOfMemory: where no allowed micro-batch fits, or with batch_size="auto" no sample.
            CheckpointError: where a checkpoint cannot be written or does not fit.
            Interrupted: after Ctrl-C or SIGTERM, once the checkpoint is written (exits 130 or 143).
        """
        if comes_back() and not finished_fits():
            # The other ranks have just written a checkpoint, after the evaluation of a warm start.
            resume, self._is_warm = True, False
        size = None if batch_size == "auto" else batch_size
        data = FitData(
            x, y, size, validation_split, validation_data, shuffle, class_weight,
            sample_weight, steps_per_epoch, validation_steps, validation_batch_size,
        )  # fmt: skip
        options = FitOptions(
            batch_size == "auto", epochs, verbose, callbacks, initial_epoch, validation_freq,
            drop_last, max_steps, progress,
        )  # fmt: skip
        if options.largest_batch:
            check_is_open(self.objective, x, y, self.loop)
        before: dict[str, float] = {}
        history = self.objective.fit_as_written(data, self.loop, options)
        while history is None:
            before, source, validation = self._prepare_fit(data, options, resume)
            history = self._run_fit(options, source, validation)
            resume = True  # if killed ranks rejoin, all ranks go on from the newest checkpoint
        self.history = history
        if before and (line := compared(before, history)):
            history.notes.append(line)
            self.loop.say(line)
        return history

    def _prepare_fit(
        self, data: FitData, options: FitOptions, resume: bool | str
    ) -> tuple[dict[str, float], Source, Source | None]:
        objective = self.objective
        folder, self._folder = self._folder, None
        own = {"run": folder, "resume": True} if folder else run_of_command(self._run, resume)
        self.loop = self._new_loop(**own)
        objective.fits_before = objective.count_fits(
            self.loop, options.initial_epoch, bool(own["resume"])
        )
        # A small batch may drop samples that a larger batch can use.
        drops = options.drop_last and not options.largest_batch
        source, validation = objective.to_fit(data, self.loop, drop_last=drops)
        if self.optimizer is None and isinstance(source, Pipeline) and source.id_columns:
            self._know(objective.build(source, self.loop))  # creates the model's tables
        before = self._before_training(validation, data.validation_steps)
        source, validation = self.learn(source, validation)
        self._know(objective.build(source, self.loop))
        before = before or self._before_training(validation, data.validation_steps)
        if options.largest_batch:
            source = self._in_largest_batches(data, source, drop_last=options.drop_last)
        objective.weigh_classes(source, self.loop, self.classes)
        source = objective.cut(source, data.steps_per_epoch, self.loop)
        if validation is not None:
            validation = objective.cut(validation, data.validation_steps, self.loop, restarts=True)
        return before, source, validation

    def _run_fit(
        self, options: FitOptions, source: Source, validation: Source | None
    ) -> History | None:
        objective = self.objective
        ours, theirs = objective.split_callbacks(options.callbacks)
        first = first_epoch(options.initial_epoch)
        shown = progress_of(options.verbose) if options.progress is None else options.progress
        self._fit = fit = Fit(
            self, objective, source, validation, options.epochs, ours, shown, first,
            options.validation_freq, options.max_steps,
        )  # fmt: skip
        fit.callbacks[:0] = objective.begin(fit.state, fit.job, theirs, first, options.verbose)
        self.history = fit.state.history  # partial, should the fit end in an error
        self.history.largest_batch = self.loop.trainer.largest_batch
        # A rank that rejoins starts at the first fit of its script.
        fit.may_take_back = not finished_fits()
        with device_asserts_explained(self.model):
            try:
                fit.run()
            finally:
                objective.end()
        if fit.takes_back:
            self.world().take_back()
            self._folder = self.loop.run
            return None
        count_finished_fit()
        return self.history

    def _in_largest_batches(self, data: FitData, source: Source, *, drop_last: bool) -> Source:
        loop, objective = self.loop, self.objective
        trying = self._new_loop(run=None, say=lambda line: None)
        trying.feed.inputs = loop.feed.inputs
        try:
            batch = largest_batch(objective, loop, trying, source)
            data = data._replace(batch_size=batch.batch_size)
            source, _ = objective.to_fit(data, trying, drop_last=drop_last)
        finally:
            trying.close()
        words = batch.words(objective.optimizer, loop.asked.lr_rule)
        loop.trainer.largest_batch = {**batch.as_dict(), "words": words}
        loop.say(words)
        return trained(self._agreed(source), self.signature or Signature())

    def _before_training(self, validation: Source | None, steps: int | None) -> dict[str, float]:
        if not self._is_warm or self.optimizer is None:
            return {}
        self._is_warm = False
        if validation is None or self.loop.resume_checkpoint is not None:
            return {}
        loop, random = self.loop, random_state()
        # The fit must not use settings that this evaluation decides.
        self.loop = self._new_loop(run=None, say=lambda line: None)
        try:
            with self.to_evaluate(validation) as source:
                source = self.objective.cut(source, steps, self.loop, restarts=True)
                logs = self.objective.evaluate(self.loop, source) or {}
        finally:
            self.loop.close()
            self.loop = loop
            set_random_state(random)
        loop.say(f"before training: {figures_words(logs)}")
        return logs

    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: int | str = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = True,
    ) -> Any:
        """Return loss and metrics over all samples, each counted once; keep the model's modes.

        Args:
            x: data in any form that `fit` takes.
            y: targets, if they are not part of `x`.
            batch_size: samples per batch; 256 by default, 32 for a compiled Keras model.
            verbose: for a compiled Keras model, 1 shows Keras' bar and 2 its line. Other values,
                and all values for other models, show nothing.
            sample_weight: each sample's weight in the loss, as for `fit`.
            steps: number of batches to read, from the first; None reads all.
            callbacks: Keras callbacks, for a compiled Keras model only.
            return_dict: False returns the figures as a list, the loss first. A compiled Keras model
                returns them in the form of `model.evaluate`.

        Returns:
            the figures by name, or in the form that `return_dict` selects.

        Raises:
            NumbersError: if a weight or buffer is not finite.
        """
        objective = self.objective
        progress_of(verbose)  # checks it
        figures = objective.evaluate_as_written(
            x=x, y=y, batch_size=batch_size, verbose=verbose, sample_weight=sample_weight,
            steps=steps, callbacks=callbacks,
        )  # fmt: skip
        if figures is None:
            given = objective.to_evaluate(x, y, self.loop, batch_size, sample_weight, steps)
            with (
                self.to_evaluate(given) as source,
                objective.followed(callbacks, self.loop, source.steps, verbose),
            ):
                self._know(objective.build(source, self.loop))
                source = objective.cut(source, steps, self.loop, restarts=True)
                figures = objective.evaluate(self.loop, source)
                names = guard.not_finite(figures or {})
                if names and self.world().is_first:
                    self.loop.say(guard.not_finite_words(names, "this evaluation", source))
        assert figures is not None
        return figures if return_dict else objective.in_order(figures)

    def worst(self, x: Any, y: Any = None, *, n: int = 20, batch_size: int | None = None) -> Worst:
        """Return the samples with the highest loss.

            print(trainer.worst(val))
            trainer.worst(val).plot("worst.png")

        Args:
            x: data in any form that `evaluate` takes.
            y: targets, if they are not part of `x`.
            n: number of samples to return, over all ranks.
            batch_size: samples per batch; 256 by default.

        Returns:
            a list of `WorstSample`, the highest loss first: loss, number, origin, true and
            predicted class with its probability. `as_dict()` gives plain data, and `plot(path)`
            draws the images.

        Raises:
            ModelError: the model has several losses, or its own `compute_loss` in Keras.
            DataError: there are no targets.
        """
        given = self.objective.to_evaluate(x, y, self.loop, batch_size)
        with self.to_evaluate(given) as source:
            self._know(self.objective.build(source, self.loop))
            classes = self.classes or getattr(source, "classes", None)
            return worst(self.objective, self.loop, source, n, classes)

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: int | str = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """Return the model's outputs for all samples, in order, on the CPU.

        Args:
            x: data as `evaluate` takes them, with or without targets. If the model was trained on
                `flatout.data.images`, also the path of an image file, a list of paths, or a folder
                of images. The files become inputs as they did in training.
            batch_size: samples per batch.
            verbose: for a compiled Keras model, 1 shows Keras' bar and 2 its line. Other values,
                and all values for other models, show nothing.
            steps: number of batches to read, from the first; None reads all.
            callbacks: Keras callbacks, for a compiled Keras model only. On several ranks, a
                callback's logs have the outputs of this rank's part of each batch.

        Returns:
            a tensor (or tuple or dict of tensors, as the model returns them) with one row per
            sample. `classes` names the classes by number. A compiled Keras model returns numpy
            arrays.

        Raises:
            DataError: the data have classes that the model does not know, or the model does not
                know how a file becomes its input.
        """
        objective = self.objective
        progress_of(verbose)  # checks it
        written = objective.predict_as_written(
            x=x, batch_size=batch_size, verbose=verbose, steps=steps, callbacks=callbacks
        )
        if written is not None:
            return written
        if (drawn := drawn_order(x)) is not None:
            self.loop.say(
                f"predict returns rows in the order of the data, which {drawn} draws: no row can "
                "be matched to its sample; predict on the data without shuffling"
            )
        given = objective.to_predict(
            files_as_images(x, self.signature), self.loop, batch_size, steps
        )
        with (
            self.to_evaluate(given) as source,
            objective.followed(callbacks, self.loop, source.steps, verbose),
        ):
            if not getattr(self.model, "built", True):
                self._know(objective.build(source, self.loop))
            source = objective.cut(source, steps, self.loop, restarts=True)
            return objective.as_given(objective.predict(self.loop, source))

    def save(self, path: str | Path) -> Path:
        """Write the weights under the model's own keys; the name's ending decides the format.

        Where the schema states ids, their rows are written next to the model file:
        `day.ids.safetensors` next to `day.safetensors`.

        Args:
            path: `.safetensors`, which has checksums, or `.pt` or `.pth`, which
                `torch.load(path, weights_only=True)` reads as a dict of tensors. For a Keras model
                `.keras` (the whole model), `.weights.h5` or `.safetensors`.

        Raises:
            NumbersError: if a weight or buffer is not finite.
            CheckpointError: for another ending, or if the file cannot be written; an older file is
                then still whole.
        """
        check_ending(path, self.objective.adapter)
        guard.check_state(self.model, "saving")
        ids = None if self.signature is None else self.signature.ids
        if ids is not None:
            self.world().by_first(lambda: ids.save(path))
        # All ranks gather the weights before the first rank writes them.
        weights = None
        if self.loop.meets_in_compute:
            weights = self.loop.weights(kept=self.world().is_first)
        self.world().by_first(lambda: save_model_file(path, self.model, self.metadata(), weights))
        return Path(path)

    def load(self, path: str | Path) -> None:
        """Load weights from a file into the model, in place; execute no code from the file.

        Args:
            path: a file that `save` has written. A torch model also takes any safetensors file or
                torch.save's dict of tensors.

        Raises:
            CheckpointError: if the file is damaged, or belongs to another model.
        """
        signatures: list[Signature | None] = []

        def prepare(metadata: dict[str, str]) -> None:
            signatures.append(with_room(metadata, str(path), self.model, self.optimizer))

        load_model_file(path, self.model, prepare, self.loop.say)
        self._know(signatures[0])

    def _know(self, signature: Signature | None) -> None:
        self.signature = signature or self.signature

    def load_best(self, run: str | Path | None = None) -> str:
        """Load a run's best weights into the model, in place, and return a line that names them.

        The best weights are those of the checkpoint with the best score (`BestCheckpoint` sets
        scores), or those that `EarlyStopping` holds.

        Args:
            run: the run folder; by default this Trainer's own.

        Raises:
            CheckpointError: without a run folder, where nothing shows which weights are the best,
                or where the weights belong to another model.
        """
        folder = self.loop.run if run is None else run
        if folder is None:
            raise CheckpointError(
                "there is no run folder whose best weights could be loaded",
                do="Trainer(model, run=folder) writes one; or name one: load_best(folder)",
            )
        if run is None:
            self.loop.checkpointing.wait()
        self.world().wait()  # until the first rank has written its files
        weights = read_weights_of(folder, "best")
        check_fits(weights_of(self.model), weights.tensors, where=weights.where)
        known = None if self.signature is None else self.signature.ids
        signature = Signature.of(weights.metadata, weights.where, known)
        load_weights(self.model, weights.tensors)
        self._know(signature)
        return f"best weights: {weights.where}{f', {weights.score}' if weights.score else ''}"

    def save_checkpoint(self, score: float | None = None) -> str:
        """Write a checkpoint of everything into the run folder, and return its path.

        A callback may ask for a checkpoint at any time: it is written once all callbacks have run.

        Args:
            score: the checkpoint with the smallest score is kept in addition to the newest.

        Raises:
            CheckpointError: without a run folder, before the first fit, or if it cannot be written.
        """
        if self._fit is None and self.devices > 1:
            raise CheckpointError(
                "the ranks that trained have ended, and their state, which a checkpoint "
                "needs, is lost",
                do="give the Trainer a run folder, so that the ranks write checkpoints while "
                "they train",
            )
        if self._fit is None:
            raise CheckpointError("there is nothing to save before the first fit")
        return self._fit.save_checkpoint(score)

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the classes by number, as in `predict`'s outputs; None where none are known.

        The names come from the training data or the loaded file, and are saved with the model.
        Data that number the classes otherwise are renumbered to match. Set the names for data in
        arrays, or set None to let the next training data name the classes.
        """
        return None if self.signature is None else self.signature.classes

    @classes.setter
    def classes(self, names: Sequence[str] | None) -> None:
        result = None if names is None else as_classes(names)
        self.signature = replace(self.signature or Signature(), classes=result)

    @property
    def resolved(self) -> ResolvedRecipe | None:
        """Settings of the latest fit's steps, with reasons; None before the first fit."""
        return self.loop.resolved

    # -- the model's facts about its data ----------------------------------------------------------

    def learn(self, source: Source, validation: Source | None) -> tuple[Source, Source | None]:
        """Update the signature from training data, and return the sources that fit is to read."""
        source = self._agreed(source)
        before = self.signature
        self.signature = signature_of(source, before, self.objective.takes_bytes)
        try:
            self.signature = replace(self.signature, ids=self._learned_ids(source))
            train = trained(source, self.signature)
            checked = None if validation is None else to_evaluate(validation, self.signature)
            if checked is not None:
                check_bytes(checked, self.signature, self.objective.takes_bytes)
        except DataError:
            self.signature = before
            raise
        self.loop.feed.inputs = self._inputs(self.signature, train, checked)
        self.loop.trainer.metadata = self.metadata()
        self.loop.trainer.ids = (
            None if self.signature.ids is None else self.signature.ids.as_state()
        )
        lines = [words_of(self.signature, source), renumbered_words(source, train)]
        if validation is not None and checked is not None:
            result = (renumbered_words(validation, checked), resized_words(self.signature, checked))
            lines += [None if words is None else f"validation: {words}" for words in result]
        self.input_lines = [line for line in lines if line is not None]
        return train, checked

    def _learned_ids(self, source: Source) -> ModelIds | None:
        known = None if self.signature is None else self.signature.ids
        if known is None and not (isinstance(source, Pipeline) and source.id_columns):
            return None
        loaded = self.loop.resume_checkpoint
        state = None if loaded is None else loaded.state.get("ids")
        if loaded is None or state is None:
            return learn_ids(source, known, self.model, self.optimizer, self.loop)
        ids = ModelIds.of_state(state, loaded.name)
        return make_room(self.model, ids, loaded.name, self.optimizer)

    @contextmanager
    def to_evaluate(self, source: Source) -> Iterator[Source]:
        """Yield the source with the model's signature applied, for evaluation or prediction.

        Within the context, batches are prepared as this source needs it: a callback may evaluate
        other data than the training data.
        """
        source = self._agreed(source)
        signature = self.signature
        if signature is None:
            signature = signature_of(source, None, self.objective.takes_bytes)
        result = to_evaluate(source, signature)
        check_bytes(result, signature, self.objective.takes_bytes)
        for words in (renumbered_words(source, result), resized_words(signature, source)):
            if words is not None:
                self.loop.say(f"input: {words}")
        before, self.loop.feed.inputs = self.loop.feed.inputs, self._inputs(signature, result)
        try:
            with device_asserts_explained(self.model):
                yield result
        finally:
            self.loop.feed.inputs = before

    def _agreed(self, source: Source) -> Source:
        world = self.world()  # joins the ranks; from here on only the first rank prints
        return source.agreed(world.gather) if isinstance(source, Pipeline) else source

    def metadata(self) -> dict[str, str]:
        """Return the metadata that is saved in a file with the weights."""
        return {} if self.signature is None else self.signature.metadata()

    def _inputs(self, signature: Signature, *sources: Source | None) -> Inputs:
        last = self.objective.adapter.takes_channels_last()
        schemas = [schema_of_images(s) for s in sources if isinstance(s, Pipeline)] if last else []
        shapes = frozenset(schema["image"].shape for schema in schemas if schema is not None)
        return Inputs(signature.pixels, last, shapes)

    def world(self) -> World:
        """Return the ranks that this job runs on, and join them where fit has not done so."""
        return self.loop.world


def figures_words(figures: Mapping[str, float]) -> str:
    """Format a validation's figures, the metrics first: "val auc 0.7794, loss 0.1214"."""
    named = sorted(figures.items(), key=lambda item: item[0] == "loss")
    return "val " + ", ".join(f"{name} {rounded(value, 4)}" for name, value in named)


def compared(before: Mapping[str, float], history: History) -> str:
    """Format a fit's last validation next to the figures before training; "" without one."""
    now = history.epochs[-1] if history.epochs else {}
    names = sorted((n for n in before if f"val_{n}" in now), key=lambda name: name == "loss")
    pairs = [
        f"{n} {rounded(now[f'val_{n}'], 4)} (before training, same rows: {rounded(before[n], 4)})"
        for n in names
    ]
    return f"val {', '.join(pairs)}" if pairs else ""


def progress_of(verbose: int | str) -> bool | Progress | None:
    """Return the progress display that Keras' `verbose` selects."""
    if verbose not in (0, 1, 2, "auto"):
        raise ModelError(f"verbose is 0, 1, 2 or 'auto', found {verbose!r}")
    if verbose == 2:
        return Progress(bar=False, line_every=math.inf)
    return None if verbose else False


def first_epoch(number: int) -> int:
    """Check and return the number of a fit's first epoch.

    Raises:
        ModelError: the number is no integer from 0 on.
    """
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ModelError(f"initial_epoch is the number of an epoch from 0 on, found {number!r}")
    return number


def _weights(model: nn.Module) -> str:
    each = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    total, trained = sum(count for count, _ in each), sum(count for count, does in each if does)
    return f"{total:,} weights" + ("" if trained == total else f" ({trained:,} train)")
