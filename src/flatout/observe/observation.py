"""Plain data about one rank of a script, as the hooks recorded it: the input of the checks.

A signal that could not be recorded is None, never zero: a check that lacks its signal says so.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

from pydantic import TypeAdapter

BECAME = "the script has become another program"
"""Prefix of the note on a script that replaces its process by `os.exec`."""


@dataclass(frozen=True)
class Site:
    """A line in the user's code.

    Attributes:
        file: path of a file of the user, as Python names it; never a file of torch or another
            installed package. A cell of a notebook is "cell 3".
        line: line number, from 1.
        code: text of the line without surrounding space; empty where the file cannot be read.
    """

    file: str
    line: int
    code: str = ""

    def __str__(self) -> str:
        between = ", line " if self.file.startswith("cell ") else ":"
        return f"{self.file}{between}{self.line}"


@dataclass
class Scaling:
    """A normalization whose statistics were computed over validation samples too.

    Attributes:
        by: name of the scaler or statistics: "StandardScaler", or "mean and standard deviation",
            "minimum and maximum" or "median".
        site: line that computed the statistics; None where only the normalized numbers reveal the
            scaling.
        samples: number of training and validation samples that the statistics cover.
        held_out: number of validation samples among `samples`.
        off: largest mean of a column over all of `samples`, in standard deviations; None where the
            scaler itself was found.
        off_training: largest mean of a column over the training samples alone, in standard
            deviations.
        misses: where all samples together reach both ends of a range, the distance of the training
            samples from one end.
        is_held: whether the dataset holds the statistics and scales by them, so that the statistics
            were not computed from the recorded samples.
    """

    by: str
    site: Site | None = None
    samples: int = 0
    held_out: int = 0
    off: float | None = None
    off_training: float | None = None
    misses: float | None = None
    is_held: bool = False


@dataclass
class Call:
    """Calls of one kind from one line.

    Attributes:
        kind: the called function. With plain names: "item", "tolist", "cpu", "numpy", "print",
            "log", "save", "empty_cache", "zero_grad", "backward", "gc", "metric", "data_parallel",
            "ddp", "set_epoch", "no_sync", "threads", "deepcopy". Further kinds: "index" (a batch by
            advanced indexing), "to_device" (a copy from the host), "device_count" (or
            torch.cuda.init), "setenv" (a variable of an OpenMP library). Also "round_trip" (a copy
            to the host and back to a device), "optimizer" (construction of one), "clip" (gradient
            clipping), "switch" (a global setting of torch). Also "collective" (of
            torch.distributed), "checkpoint" (a part of forward that backward recomputes).
        site: the user's line that led to the call.
        count: number of calls, from the first observed step to the last.
        seconds: total seconds of the calls; None where this kind is not timed.
        steps: number of different steps with such a call.
        detail: data that the checks of this kind need, such as {"set_to_none": False}, or the mean
            "bytes" per call.
    """

    kind: str
    site: Site
    count: int = 0
    seconds: float | None = None
    steps: int = 0
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass
class Loader:
    """A torch DataLoader, or another iterable that gave the batches.

    Attributes:
        kind: the class, as module.Name.
        site: the user's line that iterates over the loader.
        made_at: the user's line that made the loader; if a library made it, the user's line that
            made the first loader of the same dataset.
        dataset: class of the dataset. `length` (number of samples or batches, as the dataset says)
            and `dataset_site` (line of its `__getitem__`) are None where the dataset has none.
        batch_size, num_workers, persistent_workers, pin_memory, drop_last, prefetch_factor:
            arguments of torch's DataLoader with these names.
        shuffles: whether its sampler draws a random order.
        draws_order: whether a sampler class of the script draws a random order: its code calls a
            function such as `randperm`.
        is_distributed: whether its sampler gives each rank its own part of the samples.
        epochs: number of iterations that were begun over it.
        first_ms: milliseconds that the script waited for the first batch of each epoch.
        wait_ms: median milliseconds of waiting for a batch, without first batches of epochs.
        batches: number of batches that were taken.
        batch_bytes: bytes of one batch.
        sample_bytes: bytes of one sample as the dataset returns it.
        hashes: one hash per epoch over the sample indices of its first batch; None where the
            sampler is not accessible.
        worker_hashes: one hash per worker. Equal hashes mean that the workers began with the same
            random state and drew from it. The hash covers the generator that differs least between
            workers. Empty where the workers drew nothing, None where this was not recorded.
        worker_draws: name of the generator in `worker_hashes`: "torch", "random", "numpy", or its
            path in the dataset, such as "dataset.rng"; "" where the workers drew nothing.
        is_iterable: whether the dataset is an IterableDataset, whose samples have no indices.
        gives_batches: whether the dataset returns whole batches instead of single samples.
        lanes_ms: milliseconds per batch within the loader, by kind of work: "read", "decode",
            "transform", "collate"; measured in a worker where the loader has workers.
        hot: user's lines that take most of the loader's time, each with its share of that time,
            largest first.
        decodes_at: the user's line that takes most of the decoding time.
        opens_per_sample: mean number of files opened per sample.
        open_files: files of at least one MiB that stay open for reading between batches, with
            their bytes; over all workers.
        stages: classes of the datapipes that samples pass through, from the source on, such as
            ["IterableWrapper", "Shuffler", "Batcher"]; None where the dataset is no chain of
            torch's datapipes.
        kept_per_sample: entries that each sample read in this process added to the dataset's own
            lists, dicts and sets; None where workers read, or too few samples were read.
        in_training: whether the loader's batches were used for training, not only for evaluation.
        is_in_order: whether it gives its samples in the order in which the dataset stores them.
        label_runs: numbers of classes, of runs of one class, of samples, and of samples in the
            second largest class, from the labels that its dataset holds; None where the labels are
            unknown.
        shared_rows: for a loader used only for evaluation, the number of its samples that equal a
            training sample bit for bit, and the number of samples compared; None where the samples
            are not accessible.
        shared_files: whether the samples in `shared_rows` are equal because they are read from the
            same files.
        shared_windows: number of its samples that are a window of a series, and equal a training
            window shifted by one step.
        unseen_classes: for a loader used only for evaluation, the classes that no training sample
            has, and the number of samples of these classes.
        scaling: for a loader used only for evaluation, the normalization whose statistics cover
            both its samples and the training samples.
        worker_batches: for an IterableDataset only, a hash of the first batch of each worker, then
            a hash of the second batch of the first worker. Equal hashes mean equal batches, also
            across ranks.
        taken: with several ranks, a hash of each of the first samples of an epoch; None where the
            samples are not accessible, or may repeat.
        parts: where several ranks or workers divide the samples, the part that this loader reads,
            for each of the first epochs, or for each worker of a stream. A part is every n-th
            sample of `parts_of`, stored as (remainder by n, n); None of too few samples, or where
            this is unknown.
        block: where several ranks or workers divide the samples and the dataset is a Subset of
            consecutive samples: the first index, the number of samples, and the number of samples
            in the whole dataset.
    """

    kind: str
    site: Site | None = None
    dataset: str = ""
    made_at: Site | None = None
    dataset_site: Site | None = None
    length: int | None = None
    batch_size: int | None = None
    num_workers: int | None = None
    persistent_workers: bool | None = None
    pin_memory: bool | None = None
    drop_last: bool | None = None
    prefetch_factor: int | None = None
    shuffles: bool | None = None
    draws_order: bool = False
    is_distributed: bool | None = None
    epochs: int = 0
    first_ms: list[float] = field(default_factory=list)
    wait_ms: float | None = None
    batches: int = 0
    batch_bytes: int | None = None
    sample_bytes: int | None = None
    hashes: list[int] | None = None
    worker_hashes: list[int] | None = None
    worker_draws: str = ""
    is_iterable: bool | None = None
    gives_batches: bool | None = None
    lanes_ms: dict[str, float] = field(default_factory=dict)
    hot: list[tuple[Site, float]] = field(default_factory=list)
    decodes_at: Site | None = None
    opens_per_sample: float | None = None
    open_files: list[tuple[str, int]] | None = None
    stages: list[str] | None = None
    kept_per_sample: float | None = None
    in_training: bool = True
    is_in_order: bool = False
    label_runs: tuple[int, int, int, int] | None = None
    shared_rows: tuple[int, int] | None = None
    shared_files: bool = False
    shared_windows: int = 0
    unseen_classes: tuple[list[int], int] | None = None
    scaling: Scaling | None = None
    worker_batches: list[int] = field(default_factory=list)
    taken: list[int] | None = None
    parts: list[tuple[int, int] | None] | None = None
    parts_of: int | None = None
    block: tuple[int, int, int] | None = None


@dataclass
class Table:
    """A tensor or array of the script whose rows are the batches, where no DataLoader gives them.

    Attributes:
        name: the script's name of the variable.
        site: line that calls the model with rows of the table.
        length: number of samples.
        batch_size: number of samples in one call of the model.
        in_training: whether the table's rows are used for training, not only for evaluation.
        shared_rows, shared_files, shared_windows, scaling: attributes as in Loader, for the rows of
            this table.
    """

    name: str
    site: Site | None = None
    length: int = 0
    batch_size: int = 0
    in_training: bool = True
    shared_rows: tuple[int, int] | None = None
    shared_files: bool = False
    shared_windows: int = 0
    scaling: Scaling | None = None


@dataclass
class Optimizer:
    """An optimizer that stepped.

    Attributes:
        kind: the class, as module.Name.
        site: line where the user calls step().
        backward_site: line where the user calls backward().
        steps: number of steps taken.
        step_share: the optimizer's share of the time of all optimizers' steps.
        backwards: median number of backward passes per step.
        fused, foreach: values of these options as the script gave them; None where the class takes
            no such option.
        parameters: number of parameter tensors.
        elements: number of elements in the parameters.
        local_bytes: bytes of the parameter parts that this rank holds.
        devices, dtypes: names of the devices and of the dtypes of the parameters.
        sparse_share: share of the embedding rows updated by a step whose gradient is not zero.
            Every row of a sparse gradient counts as one with a gradient.
        rates: learning rate of its first parameter group in some of its first steps: [step, rate].
        first_target: the full learning rate according to its scheduler; None without a scheduler.
        subnormal_share: largest share of subnormal numbers in one of the optimizer's moments, on a
            CPU that does not flush subnormal numbers to zero.
        options: numeric options of its parameter groups by name, each the value farthest from
            zero; options of Keras optimizers have torch's names.
        kept_gradients: number of its first steps in which backward added to gradients left from
            the step before, and the number of steps checked; None where this was not checked.
        gradient_looks: number of gradient checks in which any of its parameters had a gradient.
        unreached: names and shapes of its trainable parameters that never had a gradient, in
            models that were called.
        orphans: shapes of the parameters without a gradient that belong to no called model.
        without_grad: the unreached parameters of layers that were called during training, but
            always with gradients disabled, by the line `no_grad_site`.
        cut: names of a model's first parameters that get no gradient, although all later parameters
            do and the layers are called with gradients enabled.
        steps_without: number of steps before which none of its parameters had a gradient, and the
            number of steps checked.
        discarded: number of backward passes whose gradients were zeroed before a step, at
            `discarded_site`, and the number of passes; None where some step used the gradients of
            all its batches.
        first_change: number of weight matrices compared before and after the first step, and the
            median ratio of the change to the matrix, both as root mean squares; None for fewer than
            three matrices.
    """

    kind: str
    site: Site | None = None
    steps: int = 0
    step_share: float = 1.0
    backwards: float = 1.0
    backward_site: Site | None = None
    fused: bool | None = None
    foreach: bool | None = None
    parameters: int = 0
    elements: int = 0
    local_bytes: int | None = None
    devices: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    sparse_share: float | None = None
    rates: list[tuple[int, float]] = field(default_factory=list)
    first_target: float | None = None
    subnormal_share: float | None = None
    options: dict[str, float] = field(default_factory=dict)
    kept_gradients: tuple[int, int] | None = None
    gradient_looks: int = 0
    unreached: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    without_grad: list[str] = field(default_factory=list)
    no_grad_site: Site | None = None
    cut: list[str] = field(default_factory=list)
    steps_without: tuple[int, int] | None = None
    discarded: tuple[int, int] | None = None
    discarded_site: Site | None = None
    first_change: tuple[int, float] | None = None


@dataclass
class Schedule:
    """A learning rate scheduler.

    Attributes:
        kind: its class.
        site: line where it is made.
        stepped_at: line that stepped the scheduler first.
        first_after: number of optimizer steps before its first step; None where not recorded.
        steps: number of steps taken.
        ends_after: number of its steps after which the learning rate is practically zero; None
            where that never happens, or is unknown.
        made_for: number of scheduler steps that it was configured for, or until its rate is zero;
            None where neither number is known.
        is_used: whether its optimizer has stepped.
        in_lapse: number of its steps in a time-lapse (see Lapse).
        mode: "min" or "max" of a ReduceLROnPlateau; "" for other classes.
        given: the argument of step() at `stepped_at`, as the script writes it.
        given_kind: kind of that argument, "loss" or "score", guessed from the script's names.
    """

    kind: str
    site: Site | None = None
    stepped_at: Site | None = None
    first_after: int | None = None
    steps: int = 0
    ends_after: int | None = None
    made_for: int | None = None
    is_used: bool = True
    in_lapse: int = 0
    mode: str = ""
    given: str = ""
    given_kind: str = ""


@dataclass
class Monitor:
    """A metric that a trainer's callback, or a comparison in the script, monitors.

    Attributes:
        kind: class of the callback, or of the arguments that request it; "if" for a comparison of
            the script with the best value so far.
        metric: name of the monitored metric.
        mode: direction that counts as better: "min" or "max".
        metric_kind: "loss" or "score", guessed from the metric's name.
        acts: the effect: "stops" the training, "keeps" the best weights, or "lowers" the rate.
        is_default: whether `mode` equals the callback's default.
        site: line where the callback is made.
    """

    kind: str
    metric: str
    mode: str
    metric_kind: str
    acts: str
    is_default: bool = False
    site: Site | None = None


@dataclass
class InLoss:
    """A finding in the graphs of losses, in the steps that were checked.

    Attributes:
        kind: the finding. "twice": the input of a loss already has the function applied that the
            loss applies. "pairs": output and target were broadcast against one another. "nan": NaN
            or infinity was replaced. "skipped": some losses were not finite, and the script skipped
            the step. "labels": the number of classes, and their order in their source column.
            "padding": padding counts as a target. "bounded": a loss takes scores after ReLU or
            tanh. "single": softmax over a single score. "undivided": means of several batches were
            summed for a step. "cut": a term ends in a tensor that is newly made in each step.
        site: the user's line, where torch could record it.
        count: number of loss graphs with the finding.
        steps: number of the last step with the finding.
        detail: data that depend on `kind`, such as {"outer": "cross_entropy", "inner": "softmax"}.
    """

    kind: str
    site: Site | None = None
    count: int = 0
    steps: int = 0
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass
class Model:
    """A root module whose parameters an optimizer steps.

    Attributes:
        kind: the class, as module.Name.
        site: line where the user calls it.
        elements: number of elements in its parameters.
        layers: number of modules by class; "Dropout in LSTM" for modules with dropout inside.
        has_convolutions, is_channels_last, is_compiled: whether the model has convolutions, has
            weights in the channels_last format, is compiled by torch.compile.
        wrapper: "DataParallel", "DistributedDataParallel", "FullyShardedDataParallel" or "".
        wrapper_options: options of that wrapper, such as {"find_unused_parameters": True}.
        unused_parameters: whether any of its parameters had no gradient in some step; None if
            unknown.
        autocast: dtype of autocast in its training forward, "" without autocast.
        inputs: recorded shapes and dtypes of its inputs: [[shape, dtype], count].
        padding_share: share of padding in its inputs; None where the inputs are no sequences.
        lengths: number of different lengths of the input sequences, padding included.
        is_told: whether each call passes the training mode to its layers, as in Keras; the mode
            of the module then has no meaning.
        evaluated_in_train_mode: line where it was called without gradients in train mode, although
            train mode changes its output (dropout, BatchNorm).
        trained_in_eval_mode: line where it was called with gradients in eval mode, then stepped.
        evaluated_with_grad: line where it was called in eval mode with gradients enabled, and no
            backward followed.
        evaluated_every: steps between evaluations, where that number is constant.
        first_weights, first_gradients: a hash of the weights before the first step, and a hash of
            the gradients of the first step. None with a single rank, where ranks hold parts of the
            tensors, and where all gradients were zero.
        not_finite: names of parameters and buffers with NaN or infinity at the end of the
            observation, or before an evaluation or a save.
        moving_norms: names of BatchNorm layers that were in train mode when an optimizer stepped,
            although none of their parameters is trainable.
        not_stepped: names of parameters that had a gradient when an optimizer stepped, but belong
            to no optimizer; only for a model of which an optimizer steps other parameters.
        moved: names of the `not_stepped` parameters that the script itself changes, as in a moving
            average. `moved_share` is their share of all elements that had a gradient.
        misses_first: whether the `not_stepped` parameters come before all stepped parameters, as
            where only a head is meant to train.
        unregistered: names and shapes of parameters that a loss has reached, but that belong to no
            called module and no optimizer, such as those of layers in a Python list.
        repeats: number of its first `repeats_of` calls that had the same input, weights and random
            state as the call before.
        subnormal_share: largest share of subnormal numbers in one of its parameters, buffers or
            gradients, on a CPU that does not flush subnormal numbers to zero.
        frozen_share: share of the forward time in leading modules without trainable parameters.
        pool_after: names of (activation, pooling) pairs whose order could be swapped.
        pool_site: the line of the first pair.
        pool_parts, pool_ms: names of the modules in these pairs, and milliseconds of their own
            forward and backward per step; None where that time was not measured, as on a GPU.
        device_type: type of the device of its parameters: "cpu", "cuda".
    """

    kind: str
    site: Site | None = None
    elements: int = 0
    layers: dict[str, int] = field(default_factory=dict)
    has_convolutions: bool = False
    is_channels_last: bool = False
    is_compiled: bool = False
    wrapper: str = ""
    wrapper_options: dict[str, Any] = field(default_factory=dict)
    unused_parameters: bool | None = None
    autocast: str = ""
    inputs: list[tuple[str, int]] = field(default_factory=list)
    padding_share: float | None = None
    lengths: int = 0
    is_told: bool = False
    evaluated_in_train_mode: Site | None = None
    trained_in_eval_mode: Site | None = None
    evaluated_with_grad: Site | None = None
    evaluated_every: int | None = None
    first_weights: int | None = None
    first_gradients: int | None = None
    not_finite: list[str] = field(default_factory=list)
    moving_norms: list[str] = field(default_factory=list)
    not_stepped: list[str] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)
    moved_share: float = 0.0
    misses_first: bool = False
    unregistered: list[str] = field(default_factory=list)
    repeats: int = 0
    repeats_of: int = 0
    subnormal_share: float | None = None
    frozen_share: float | None = None
    pool_after: list[tuple[str, str]] = field(default_factory=list)
    pool_site: Site | None = None
    pool_parts: list[str] = field(default_factory=list)
    pool_ms: float | None = None
    device_type: str = "cpu"


@dataclass
class Backbone:
    """A module that no optimizer steps, and that the script calls by itself in each step.

    Attributes:
        kind: its class.
        site: line where it was called first.
        ms: milliseconds per step in its forward.
    """

    kind: str
    site: Site | None
    ms: float


@dataclass
class Cell:
    """A recurrent cell that is called in a loop over parts of one tensor.

    Attributes:
        kind: class of the cell, such as "LSTMCell".
        site: line where it is called.
        length: number of iterations of the loop.
        ms: milliseconds that its calls take in the forward pass of one step.
    """

    kind: str
    site: Site | None
    length: int
    ms: float


@dataclass
class OverBatch:
    """A sequence-first layer that got samples in the sequence dimension, or a softmax over samples.

    Attributes:
        kind: class or function, such as "LSTM", "MultiheadAttention" or "log_softmax".
        site: line where it is called.
        shape: shape of its input.
        count: number of such calls.
        by_targets: True if the evidence is that targets are inputs shifted by one token in each
            row; False if the evidence is the shape of a shuffled batch.
    """

    kind: str
    site: Site | None
    shape: list[int] = field(default_factory=list)
    count: int = 0
    by_targets: bool = False


@dataclass
class Unfrozen:
    """Trainable parameters where the script has set a similar attribute to False, as if to freeze.

    Attributes:
        name: the attribute, such as "require_grad".
        kind: class of the module on which `requires_grad` was set; "" where the name is misspelt.
        site: line that sets the attribute; None where that line was not found.
        parameters, elements: number of these parameter tensors, and of elements in these tensors.
        names: names of the first of these parameters.
    """

    name: str
    kind: str
    site: Site | None = None
    parameters: int = 0
    elements: int = 0
    names: list[str] = field(default_factory=list)


@dataclass
class HeldOutNodes:
    """Nodes of a graph that are held out by their name, but enter a classification loss.

    Attributes:
        name: the script's name of the mask or of the node indices.
        in_loss: number of held-out nodes that have a target in the loss.
        nodes: number of targets in the loss.
        site: the backward pass.
    """

    name: str
    in_loss: int
    nodes: int
    site: Site | None = None


@dataclass
class SharedFolds:
    """Folds of cross-validation that one model is trained on, one after another.

    Attributes:
        kind: the splitter class of scikit-learn.
        folds: number of folds.
        model: the class of the model.
        site: the loop over the folds.
    """

    kind: str
    folds: int
    model: str
    site: Site | None = None


@dataclass
class StateLoad:
    """A load of a state dict that has no effect.

    Attributes:
        kind: "unmatched" where no name matches the module. "own" where it holds the module's own
            tensors, which have changed since it was taken. "kept" where such a state dict is kept
            to be loaded later.
        model: the class of the module.
        parameters: number of tensors in the state dict.
        site: line that loads the state dict.
        taken_at: line that took the state dict from the module; None for kind "unmatched".
        steps: number of optimizer steps between taking and loading the state dict.
        given, wanted: first names of the state dict and of the module, where none match.
    """

    kind: str
    model: str
    parameters: int
    site: Site | None = None
    taken_at: Site | None = None
    steps: int = 0
    given: list[str] = field(default_factory=list)
    wanted: list[str] = field(default_factory=list)


@dataclass
class Growing:
    """A line that concatenates its former result with new data, so that it grows in each step.

    Attributes:
        words: the function, such as "torch.cat".
        site: the line.
        numbers: elements of the result when it was last measured.
        more: elements that each step adds.
        ms: milliseconds per step, in the measured steps.
        at: number of the last measured step.
        bytes: bytes per element.
        is_list: whether the line reads a whole Python list, instead of concatenating arrays.
        pieces: number of tensors or arrays that each step adds to the concatenated tensors or
            arrays.
    """

    words: str
    site: Site
    numbers: int
    more: int
    ms: float
    at: int
    bytes: int = 8
    is_list: bool = False
    pieces: int = 0


@dataclass
class UnusedGradients:
    """Gradients that a backward pass computes for parameters that its own optimizer does not step.

    Attributes:
        fate: "zeroed" before the optimizer of these parameters stepped, "added" to the gradients
            that this optimizer steps with, or "kept" where no optimizer steps these parameters.
        model: class of the model with these parameters; "" where it is unknown.
        called_at: line where the model is called.
        backward_at: the backward pass that computes the gradients.
        stepped_at: the optimizer step that this pass was for.
        passes_on: whether the gradient passes through this model to the stepped parameters.
        parameters: number of parameter tensors of that model, or of its optimizer.
        elements: number of elements in the tensors that got a gradient.
        share: share of these elements among all elements whose gradients a step's backward passes
            compute.
        count: number of backward passes in which these gradients were unused.
    """

    fate: str
    model: str = ""
    called_at: Site | None = None
    backward_at: Site | None = None
    stepped_at: Site | None = None
    passes_on: bool = False
    parameters: int = 0
    elements: int = 0
    share: float = 0.0
    count: int = 0


@dataclass
class RepeatedSeed:
    """A generator that is reset to the same seed during training.

    Attributes:
        kind: the function that seeds it, such as "numpy.random.default_rng"; or the function that
            drew the same numbers again, such as "torch.randperm".
        site: line where it is called.
        steps: number of finished steps at each reset.
        seed: seed of the torch.Generator that gave the same numbers; None where `kind` is a seeding
            function.
    """

    kind: str
    site: Site | None = None
    steps: list[int] = field(default_factory=list)
    seed: int | None = None


@dataclass
class Teacher:
    """A model that is called in each step and never trained, but has layers in train mode.

    Attributes:
        kind: its class, as module.Name.
        site: line where it is called.
        layers: number of its layers whose output depends on train mode, by class.
        moved: number of BatchNorms whose running statistics changed in four steps.
        dropped: share of elements that the model's first dropout layer set to zero; None without a
            dropout.
    """

    kind: str
    site: Site | None = None
    layers: dict[str, int] = field(default_factory=dict)
    moved: int = 0
    dropped: float | None = None


@dataclass
class LeakedTarget:
    """A column of the model's input that contains the target of the loss.

    Attributes:
        column: index of the column in a flattened sample.
        factor: multiplier that turns the column into the target, up to an offset; 1 for a copy.
        samples: number of compared samples; the column matches the target in each.
        values: number of different targets among these samples.
        shape: shape of a sample.
        site: line where the model is called.
    """

    column: int
    factor: float
    samples: int
    values: int
    shape: list[int] = field(default_factory=list)
    site: Site | None = None


@dataclass
class SeenAhead:
    """A model trained to predict the next token, whose output changes with that very token.

    Attributes:
        kind: its class, as module.Name.
        site: line where it is called.
        at: position of the checked output in the sequence, from 0.
        length: length of the sequence in tokens.
        targets: number of targets compared with the tokens; each equals the next token.
        change: change of the output, as a share of its standard deviation over the classes.
        layer: name of the layer in which the change begins; "" for the model itself.
        layer_kind: class of that layer; "" where none could be found.
    """

    kind: str
    site: Site | None = None
    at: int = 0
    length: int = 0
    targets: int = 0
    change: float = 0.0
    layer: str = ""
    layer_kind: str = ""


@dataclass
class RemadeOptimizer:
    """An optimizer that is constructed repeatedly for parameters that continue to train.

    Attributes:
        kind: its class, as module.Name.
        site: line where it is constructed.
        parameters: number of trainable tensors.
        times: number of repeated constructions.
        until: number of training steps in which the constructions were counted.
        each: median number of steps taken by each of these optimizers.
        memory: number of steps that its longest moving average spans.
    """

    kind: str
    site: Site | None = None
    parameters: int = 0
    times: int = 0
    until: int = 0
    each: int = 0
    memory: int = 0


@dataclass
class StillTarget:
    """A copy of a trained model that computes targets, with the weights from before the first step.

    Attributes:
        kind: its class, as module.Name.
        site: line where it is called.
        steps: number of steps after which its weights were still unchanged.
    """

    kind: str
    site: Site | None = None
    steps: int = 0


@dataclass
class EqualViews:
    """Images that a trained model gets twice in each step, as bitwise equal, separate tensors.

    Attributes:
        kind: its class, as module.Name.
        site: line where it is called.
        samples: number of equal images.
        steps: number of steps in which they were equal.
        is_batch: whether the equal images are the two halves of one batch, instead of the batches
            of two calls.
    """

    kind: str
    site: Site | None = None
    samples: int = 0
    steps: int = 0
    is_batch: bool = False


@dataclass
class KeptGraphs:
    """A variable of the script that keeps the autograd graphs of past steps alive.

    Attributes:
        name: the script's name, such as "losses" or "meter.total".
        site: the line that adds to the variable; None where that line was not found.
        is_list: True if the variable is a list of tensors, False if it is a sum.
        steps: number of steps whose graphs it kept alive at the last check.
        nodes: number of graph nodes that it kept alive then.
    """

    name: str
    site: Site | None
    is_list: bool
    steps: int
    nodes: int


@dataclass
class Growth:
    """Increase of a line's time from each step to the next.

    Attributes:
        us: increase per step in microseconds; `low` and `high` are the ends of its 95% interval.
    """

    us: float
    low: float
    high: float


@dataclass
class Line:
    """A user's line that steps spend time in, including the library code that it calls.

    Attributes:
        site: the line.
        ms: milliseconds per step.
        lanes_ms: milliseconds per step by lane.
        words: source text of the line's call, such as "torch.quantile".
        callers: user's lines that called it most often, innermost first.
        within: the module that took most of the time, such as "BertLayer"; for a trainer's or
            DataLoader's own code, the function.
        trainer: the package whose training loop this line only starts, such as "lightning"; "" for
            none.
        samples: number of stack samples taken in the line; the fewer, the less exact is `ms`.
        growth: increase of the line's time per step; None where that time does not increase.
    """

    site: Site
    ms: float
    lanes_ms: dict[str, float] = field(default_factory=dict)
    words: str = ""
    callers: list[Site] = field(default_factory=list)
    within: str = ""
    trainer: str = ""
    samples: int = 0
    growth: Growth | None = None


@dataclass
class ModuleTime:
    """Modules of one class and position in the model, with their time without child modules.

    Attributes:
        name: name of the module, such as "head"; a star stands for the part that differs between
            several, such as "layers.*.attention". "" for the model itself.
        kind: their class; "" for code outside of all modules, such as a functional loss.
        count: number of modules.
        forward_ms, backward_ms: milliseconds per step in forward and in backward.
        operator: autograd's name of the operator that takes most of their backward, such as "Bmm";
            "" where none dominates, and for torch's own layers.
    """

    name: str
    kind: str
    count: int = 0
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    operator: str = ""

    @property
    def words(self) -> str:
        """Name, class and number of the modules, as text."""
        if not self.kind:
            return "outside of the model's modules"
        several = f"{self.count} " if self.count > 1 else ""
        return f"{self.name or 'the model itself'} ({several}{self.kind})"


@dataclass
class OtherThread:
    """A thread of the script other than the stepping thread.

    Attributes:
        name: name of the thread in Python.
        site: the user's line that it runs most often, while it does not wait for another thread.
        busy: share of the stack samples in which it did not wait.
        share: share of all its stack samples that were at `site`.
    """

    name: str
    site: Site
    busy: float
    share: float


@dataclass
class Ablation:
    """Duration of a step with one lane taken out, measured in the running script.

    Attributes:
        ratio: step time with the lane divided by step time without the lane; `low` and `high` are
            the ends of its 95% interval.
        floor: distance of the ratio from 1 that noise alone would cause.
        pairs: number of times that blocks A B B A were measured; 0 where the lane's own time
            suffices.
        step_ms, without_ms: median milliseconds per step of the blocks with the lane, and of the
            blocks without the lane.
        returns_ms: maximum milliseconds per step that any cure of this lane can save.
    """

    ratio: float
    low: float
    high: float
    floor: float = 0.0
    pairs: int = 0
    step_ms: float = 0.0
    without_ms: float = 0.0
    returns_ms: float = 0.0


@dataclass
class DeviceTime:
    """Work of a GPU per step, from some steps under torch's profiler.

    Attributes:
        steps: number of profiled steps.
        busy_ms: milliseconds per step in which the GPU ran anything; overlapping work counts once.
        lanes_ms: milliseconds per step of kernels, by the lane in which the host launched them:
            "backward", "optimizer", or "forward" for all other lanes.
        to_device_ms, to_host_ms: milliseconds per step of copies from the host and to the host.
        is_pageable: whether any copy to the device came from memory that is not pinned.
        kernels: names of the kernels that take the most time, with milliseconds per step, in order
            of decreasing time.
        launches: number of kernels and copies per step.
        step_ms: milliseconds of a profiled step, which profiling lengthens on a slow host.
    """

    steps: int
    busy_ms: float
    lanes_ms: dict[str, float] = field(default_factory=dict)
    to_device_ms: float = 0.0
    to_host_ms: float = 0.0
    is_pageable: bool = False
    kernels: list[tuple[str, float]] = field(default_factory=list)
    launches: float = 0.0
    step_ms: float = 0.0


@dataclass
class LeftOut:
    """A call whose value is unused and that does not affect training, and a step without it.

    Attributes:
        site: line where the call is made.
        words: source text of the called expression.
        measured: Ablation with the duration of steps with and without the call.
        first: number of the first assignment's line that only this call reads, else the number of
            the call's line.
    """

    site: Site
    words: str
    measured: Ablation
    first: int = 0

    def ms(self) -> tuple[float, float, float]:
        """Return the call's time per step: low end of the 95% interval, estimate, high end."""
        measured = self.measured
        low, middle, high = (
            measured.step_ms * (1 - 1 / r) for r in (measured.low, measured.ratio, measured.high)
        )
        return low, middle, high

    @property
    def is_proven(self) -> bool:
        """True if leaving the call out makes a step shorter beyond the noise."""
        return self.measured.low > 1 + self.measured.floor


@dataclass
class Lapse:
    """Findings of the time-lapse after the timed steps, in which epochs are cut short.

    Attributes:
        seconds: seconds that the time-lapse took.
        steps: number of optimizer steps in the time-lapse.
        epochs: number of epochs that ended in the time-lapse.
        parts: parts of the script that ran in addition to training: "validation", "checkpoint",
            "schedule".
        cut: loaders and loops that were cut short: the line, the number of batches or iterations
            in the first epoch that was cut, and the full number; None where that is unknown.
        steps_schedules: whether any line of the script's files steps a scheduler, even if only in a
            later epoch.
    """

    seconds: float
    steps: int = 0
    epochs: int = 0
    parts: list[str] = field(default_factory=list)
    cut: list[tuple[str, int, int | None]] = field(default_factory=list)
    steps_schedules: bool = True


@dataclass
class Observation:
    """One rank, from its first observed step to its last.

    Attributes:
        command: the script and its arguments.
        framework: "torch", "keras", "lightning", "accelerate", "transformers" or "flatout".
        versions: version of Python and of each relevant package, by name.
        rank, world_size: rank of this process, and number of ranks.
        device: device on which the model computes, such as "cpu" or "cuda:0".
        threads, usable_cpus: number of torch's threads, and number of CPUs that this process may
            use.
        steps: number of observed optimizer steps.
        step_ms: milliseconds of each of those steps in order, without evaluation and saving between
            steps.
        lanes_ms: milliseconds per step by the names of measure.LANES; None for a lane that was not
            measured.
        memory_mb: MB of resident memory at each of the steps `memory_at`.
        own_mb: MB of resident memory that belongs to no file, at the same steps.
        graph_nodes: [step, autograd graph nodes alive], where memory had grown.
        graph_site: the user's line that keeps the graph nodes alive.
        page_faults: number of minor page faults per step.
        major_faults: number of major page faults per step.
        runnable: median number of runnable processes and threads of this job per usable CPU.
        job_mb: MB of memory that belongs to no file, of this process and its workers together, at
            each of the steps `job_at`, which are at least a second apart.
        swapped_mb: largest MB of memory of this process and its workers in swap.
        device_held_mb, device_peak_mb, device_total_mb: MB of GPU memory that tensors hold between
            steps, the peak of that memory, and the GPU's whole memory.
        device_failures: number of times that the GPU ran out of memory.
        device_time: work of the GPU per step; None where it was not profiled.
        backbones: modules on a CPU that no optimizer trains and that steps call on samples.
        tables: tensors or arrays whose rows are the batches, where no DataLoader gives them.
        loss_looks: number of loss graphs that were checked; `in_losses` has the findings.
        cells: recurrent cells that a Python loop calls.
        over_batch: layers that run over the samples of a batch as if over a sequence.
        softmaxes: softmaxes over the samples of a batch.
        unfrozen: parameters that the script means to freeze, but that train.
        held_out_nodes: held-out nodes of a graph that enter the loss.
        shared_folds: cross-validation loops that train one model on all folds.
        state_loads: loads of a state dict that change nothing.
        dropouts: lines where a model calls torch.nn.functional.dropout without `training=`.
        growing: data that each step concatenates, and that grow with each step.
        gradient_uses: number of backward passes that were followed to the step which uses their
            gradients, where several optimizers or models take part. `unused_gradients` are those
            that no step used.
        teachers: models that are called in each step in train mode, although nothing trains them.
        remade: optimizers constructed again for the same parameters, which loses their moments.
        leaked_targets: columns of the model's input that contain its target.
        seen_ahead: models whose input contains the token that they are to predict.
        still_targets: copies of a trained model that compute its targets and never change.
        equal_views: images that a model gets twice in a step, bitwise equal.
        kept_graphs: variables of the script that keep the graphs of past steps alive.
        repeated_seeds: generators that draw the same numbers again; None where not checked.
        schedules: learning rate schedulers.
        monitors: metrics that trainers' callbacks, or the script itself, compare to keep the best.
        epoch_loops: the script's loops over epochs: the line, and the number of iterations.
        run_steps: number of steps that the whole script would take, from the lengths of its loops;
            None where one of them has no length.
        switched_on: global debugging settings of torch that were on at the first backward pass,
            such as "detect_anomaly"; None without a backward pass.
        evaluation_site: line that called a model to evaluate it.
        saved: files written with torch.save, each {"path", "step", "keys", "bytes", "is_there"}.
            "path" is absolute, or "" for no file; "bytes" is None where unknown; "is_there" says
            whether the file existed at the end. With several ranks, "contents" is a hash of its
            tensors, None without tensors.
        compiles: [step, number of graphs that torch.compile had made by then, seconds of compiling
            them], from the second step on; empty if the script compiles nothing. The number of
            graphs may stay 0.
        openmp: names of the OpenMP libraries that the process has loaded.
        openmp_settings: environment variables for an OpenMP library, as they are at the script's
            end.
        gpu_memory_mb: by GPU uuid, the peak MB of torch's memory on each GPU on which this process
            has a context; None where torch computes on no GPU.
        shm_free_mb: MB of free space in /dev/shm, through which workers pass batches.
        disk_free_mb: MB of free space on the disk of the files in `saved`; None without such files.
        machine_cpus: number of CPUs that all ranks of this machine may use together.
        gpus: names of the GPUs that torch could use here, even if the script does not.
        bf16_units: hardware that computes in bf16 on this device, such as "AMX-bf16"; "" for none.
        available_mb: MB of memory that the job could still allocate.
        matmul_precision: value of torch.get_float32_matmul_precision() at the last step.
        cudnn_benchmark: value of torch.backends.cudnn.benchmark at the last step.
        ended: how the script ended: "done", "stopped" (the observation was complete), "failed", "no
            steps". "running" is written while the script runs, and remains if the script was
            killed.
        error: the script's own error, as Python prints it.
        added_us_per_step: microseconds of overhead per step by the observation, measured directly.
        start_s: seconds from the start to the end of the first step; None before that.
        added_once_ms: milliseconds of further overhead, by checks in the first steps and at some
            later steps. Where less than two seconds were observed, all checks are included.
        lines: the user's lines that take most of the steps' time, in order of decreasing time;
            empty where lines were not sampled.
        modules: modules that take most of the time of forward and backward on a CPU, in order of
            decreasing time; empty where modules were not timed.
        other_threads: threads of the script that run the user's code while it steps, busiest first.
        explained: share of the steps' time that is attributed to a line or a trainer's function;
            None where lines were not sampled, or too rarely.
        ablations: Ablation by lane that was left out of some steps: "input", "log" (print, logging,
            summaries), "item" (waiting for a device to read a number), "sync", "evaluation",
            "saving". Empty where no lane was left out.
        left_out: calls that were left out of some steps, with the duration of these steps.
        checkpointed_mb: MB that forward would keep for each backward pass if backward did not
            recompute them; None where nothing is recomputed, or nothing was measured.
        lapse: findings of a time-lapse; None without one.
        notes: signals that could not be recorded, each with the reason.
    """

    command: list[str]
    framework: str = "torch"
    versions: dict[str, str] = field(default_factory=dict)
    rank: int = 0
    world_size: int = 1
    device: str = "cpu"
    threads: int | None = None
    usable_cpus: int | None = None
    steps: int = 0
    step_ms: list[float] = field(default_factory=list)
    lanes_ms: dict[str, float | None] = field(default_factory=dict)
    memory_mb: list[float] = field(default_factory=list)
    own_mb: list[float] = field(default_factory=list)
    memory_at: list[int] = field(default_factory=list)
    graph_nodes: list[tuple[int, int]] = field(default_factory=list)
    graph_site: Site | None = None
    page_faults: float | None = None
    major_faults: float | None = None
    runnable: float | None = None
    job_mb: list[float] = field(default_factory=list)
    job_at: list[int] = field(default_factory=list)
    swapped_mb: float | None = None
    device_held_mb: float | None = None
    device_peak_mb: float | None = None
    device_total_mb: float | None = None
    device_failures: int | None = None
    device_time: DeviceTime | None = None
    calls: list[Call] = field(default_factory=list)
    loaders: list[Loader] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    models: list[Model] = field(default_factory=list)
    backbones: list[Backbone] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    loss_looks: int = 0
    in_losses: list[InLoss] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)
    over_batch: list[OverBatch] = field(default_factory=list)
    softmaxes: list[OverBatch] = field(default_factory=list)
    unfrozen: list[Unfrozen] = field(default_factory=list)
    held_out_nodes: list[HeldOutNodes] = field(default_factory=list)
    shared_folds: list[SharedFolds] = field(default_factory=list)
    state_loads: list[StateLoad] = field(default_factory=list)
    dropouts: list[Site] = field(default_factory=list)
    growing: list[Growing] = field(default_factory=list)
    gradient_uses: int = 0
    unused_gradients: list[UnusedGradients] = field(default_factory=list)
    teachers: list[Teacher] = field(default_factory=list)
    remade: list[RemadeOptimizer] = field(default_factory=list)
    leaked_targets: list[LeakedTarget] = field(default_factory=list)
    seen_ahead: list[SeenAhead] = field(default_factory=list)
    still_targets: list[StillTarget] = field(default_factory=list)
    equal_views: list[EqualViews] = field(default_factory=list)
    kept_graphs: list[KeptGraphs] = field(default_factory=list)
    repeated_seeds: list[RepeatedSeed] | None = None
    schedules: list[Schedule] = field(default_factory=list)
    monitors: list[Monitor] = field(default_factory=list)
    epoch_loops: list[tuple[Site, int]] = field(default_factory=list)
    run_steps: int | None = None
    switched_on: list[str] | None = None
    evaluation_site: Site | None = None
    saved: list[dict[str, Any]] = field(default_factory=list)
    compiles: list[tuple[int, int, float]] = field(default_factory=list)
    openmp: list[str] | None = None
    openmp_settings: dict[str, str] = field(default_factory=dict)
    gpu_memory_mb: dict[str, float] | None = None
    shm_free_mb: float | None = None
    disk_free_mb: float | None = None
    machine_cpus: int | None = None
    gpus: list[str] | None = None
    bf16_units: str | None = None
    available_mb: float | None = None
    matmul_precision: str | None = None
    cudnn_benchmark: bool | None = None
    ended: str = "done"
    error: str = ""
    added_us_per_step: float | None = None
    start_s: float | None = None
    added_once_ms: float | None = None
    lines: list[Line] = field(default_factory=list)
    modules: list[ModuleTime] = field(default_factory=list)
    other_threads: list[OtherThread] = field(default_factory=list)
    explained: float | None = None
    ablations: dict[str, Ablation] = field(default_factory=dict)
    left_out: list[LeftOut] = field(default_factory=list)
    checkpointed_mb: float | None = None
    lapse: Lapse | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def became(self) -> str:
        """Note that the script has become another program; "" where it has not."""
        return next((note for note in self.notes if note.startswith(BECAME)), "")

    @property
    def inputs(self) -> list[Loader | Table]:
        """Loaders and tables that gave batches."""
        return [*self.loaders, *self.tables]

    @property
    def workers(self) -> int | None:
        """Number of workers of the training loader; None without a training loader."""
        return next((loader.num_workers for loader in self.loaders if loader.in_training), None)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)

    @classmethod
    def of(cls, data: dict[str, Any]) -> Observation:
        """Build an Observation from plain data.

        Raises:
            pydantic.ValidationError: the data do not match the classes.
        """
        return _adapter().validate_python(data)


@cache
def _adapter() -> TypeAdapter[Observation]:
    # Cached, since building the adapter takes longer than reading an Observation.
    return TypeAdapter(Observation)
