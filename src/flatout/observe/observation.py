"""What was seen of one rank of a script, as plain data: what the checks look at.

Signals that could not be had are None, never zero: a check that lacks its signal says so.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

from pydantic import TypeAdapter

BECAME = "the script has become another program"
"""With this begins the note of a script that ends in `os.exec`."""


@dataclass(frozen=True)
class Site:
    """A place in the user's code.

    Attributes:
        file: as Python names it; of the user, not of torch or another installed package. A cell of
            a notebook is "cell 3".
        line: from 1.
        code: the line itself, without the space around it; empty where it cannot be read.
    """

    file: str
    line: int
    code: str = ""

    def __str__(self) -> str:
        between = ", line " if self.file.startswith("cell ") else ":"
        return f"{self.file}{between}{self.line}"


@dataclass
class Scaling:
    """A normalization whose figures were taken of samples of the validation too.

    Attributes:
        by: what has taken them: "StandardScaler", or "mean and standard deviation", "minimum and
            maximum" or "median".
        site: where; None where the numbers alone tell it.
        samples: of how many samples of training and validation the figures are.
        held_out: how many of these are the validation's.
        off: the largest mean that a column has over all of these, in standard deviations; None
            where a scaler was seen.
        off_training: likewise over the training's alone.
        misses: where all reach the ends of a range, how far the training stays from one of them.
        is_held: whether its figures are what a dataset holds to scale by, not those of the samples.
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
    """Calls of one kind from one place.

    Attributes:
        kind: what was called: "item", "tolist", "cpu", "numpy", "print", "log", "save",
            "empty_cache", "zero_grad", "backward", "gc", "index" (a batch by advanced indexing),
            "metric", "to_device" (a copy from the host), "device_count" (or torch.cuda.init),
            "data_parallel", "ddp", "set_epoch",
            "no_sync", "threads", "setenv" (of an OpenMP library), "round_trip" (back to a device),
            "optimizer" (one is made), "clip" (gradients), "switch" (something is set for all of
            torch), "collective" (of torch.distributed), "checkpoint" (a part of forward that
            backward computes again), "deepcopy".
        site: the user's line that led to it.
        count: how often, from the first observed step to the last.
        seconds: spent in them, all together; None where that is not timed.
        steps: in how many different steps they happened.
        detail: whatever else a check needs, such as {"set_to_none": False}; the mean "bytes" of a
            call.
    """

    kind: str
    site: Site
    count: int = 0
    seconds: float | None = None
    steps: int = 0
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass
class Loader:
    """A torch DataLoader, or whatever else gave the batches.

    Attributes:
        kind: the class, as module.Name.
        site: where the user iterates over it.
        made_at: the user's line that made it, or where a library made it, the first one of its
            dataset.
        dataset: class of the dataset; with its length and site of `__getitem__`, if it has them.
        batch_size, num_workers, persistent_workers, pin_memory, drop_last, prefetch_factor: as in
            torch.
        shuffles: whether its sampler draws the order.
        draws_order: whether a sampler of the script's own draws its order: its code asks for a
            permutation or the like.
        is_distributed: whether its sampler gives each rank its own part.
        epochs: how often an iteration over it was begun.
        first_ms: how long the first batch of each epoch took.
        wait_ms: median wait for one of the other batches.
        batches: how many batches were taken.
        batch_bytes: of one batch.
        sample_bytes: of one sample as the dataset returns it.
        hashes: of the indices of the first batches of each epoch, one number per epoch; None
            where the sampler is out of sight.
        worker_hashes: a number for each worker: equal ones began with the same random state and
            have drawn from it; of the generator in which the workers differ least. Empty where
            they drew nothing, None where that was not seen.
        worker_draws: the name of that generator: "torch", "random", "numpy", or where the dataset
            holds it, such as "dataset.rng"; "" where the workers drew nothing.
        is_iterable: whether it is an IterableDataset, whose samples have no numbers.
        gives_batches: whether the dataset gives whole batches, and not sample by sample.
        lanes_ms: per batch, within the loader: "read", "decode", "transform", "collate"; of the
            worker where there are workers.
        hot: the user's lines in which the loader's time goes, with their share, largest first.
        decodes_at: the user's line in which most of the decoding goes.
        opens_per_sample: files opened for one sample.
        open_files: files of a MiB or more that stay open for reading between batches, with their
            bytes; of all workers together.
        stages: what samples pass through, from the source on, such as ["IterableWrapper",
            "Shuffler", "Batcher"]; None where the dataset is no chain of torch's datapipes.
        kept_per_sample: entries by which the dataset's own lists, dicts and sets grew with each
            sample that this process read; None where workers read, or too few were.
        in_training: whether batches of it were trained on, and not only evaluated.
        is_in_order: whether it gives its samples as they lie.
        label_runs: of the labels that its dataset holds: how many classes, runs of one class, and
            samples, and samples of the second largest class; None where they were not seen.
        shared_rows: of a loader that is only evaluated, how many of its samples equal one of
            training's to the byte, of how many; None where the samples were not seen.
        shared_files: whether they are the same because they are read from the same files.
        shared_windows: how many of its samples are a window of a series that is one of training's,
            moved by a step.
        unseen_classes: likewise, the classes of its samples that training has none of, and how many
            samples these are.
        scaling: of a loader that is only evaluated, what has normalized it with the training's.
        worker_batches: a number for the first batch of each worker, and the second of the first;
            equal ones are equal, in other ranks too. Of an IterableDataset alone.
        taken: where there are several ranks, a number for each of the first samples of an epoch;
            None where they are out of sight, or may come twice.
        parts: where several ranks or workers share samples out, which part its samples are of, in
            each of the first epochs, or of a stream in each worker: each n-th of `parts_of`, as
            the remainder by n, and n; None of too few samples, or where that is out of sight.
        block: likewise, of a Subset of samples that follow one another: the first, how many, and of
            how many.
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
    """A tensor or array of the script's that batches are rows of, where no DataLoader gives them.

    Attributes:
        name: what the script calls it.
        site: where the model is called with rows of it.
        length: how many samples.
        batch_size: how many the model gets at once.
        in_training: whether they are trained on, and not only evaluated.
        shared_rows, shared_files, shared_windows, scaling: as of a Loader.
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
        site: where the user calls step().
        backward_site: where the user calls backward().
        steps: how often it stepped.
        step_share: of the time of all optimizers' steps, that of its own.
        backwards: how many backward passes went into a step, at the median.
        fused, foreach: as asked for; None where it takes no such option.
        parameters: how many tensors.
        elements: how many numbers.
        local_bytes: of the parts of them that this rank holds.
        devices, dtypes: of the parameters.
        sparse_share: of the rows of embeddings that a step goes through, the share whose gradient
            is not zero; those of sparse gradients have one.
        rates: the learning rate of its first group in some of its first steps: [step, rate].
        first_target: what a scheduler took for the full rate; None without a scheduler.
        subnormal_share: the largest share that numbers too small for full precision had in one of
            its moments on a CPU that computes with them.
        options: the numbers of its groups by name, each the one that is farthest from zero; those
            of Keras' optimizers by torch's names.
        kept_gradients: in how many of its first steps the gradients of the step before were still
            there when backward added to them, and of how many; None where that was not seen.
        gradient_looks: after how many steps it was seen which of its tensors have a gradient.
        unreached: names and shapes of its tensors that train and never had one, of models that
            were called.
        orphans: shapes of those of them that belong to no model that was called.
        without_grad: those of layers that were called to train, always where gradients are switched
            off, by the line no_grad_site.
        cut: names of the first parameters of a model, of layers that are called with gradients
            but get none, where all later ones do.
        steps_without: before how many steps none of its parameters had a gradient, of how many that
            were looked at.
        discarded: gradients of how many backward passes were zeroed before a step, of how many, at
            discarded_site; None where a step has used those of all its batches.
        first_change: of how many of its matrices the change in the first step was seen, and the
            median of what it is of their own size, as root mean squares; None of fewer than three.
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
    """A scheduler of learning rates.

    Attributes:
        kind: its class.
        site: where it is made.
        stepped_at: where it was stepped first.
        first_after: after how many steps of optimizers; None where that was not seen.
        steps: how often it was stepped.
        ends_after: after how many of its steps the rate is as good as nothing; None where it never
            is, or where that is not known.
        made_for: how many of its steps it is made for, as told or until its rate is zero; None
            where neither is known.
        is_used: whether its optimizer has stepped.
        in_lapse: how often it was stepped more in a time-lapse.
        mode: of one that waits for a plateau: "min" or "max"; "" of others.
        given: what that was stepped with at stepped_at, as the script writes it.
        given_kind: "loss" or "score", as far as the script's names tell.
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
    """What a trainer's callback, or a comparison of the script's own, looks at, and which way.

    Attributes:
        kind: the callback's class, or that of the arguments that ask for it; "if" of a comparison
            with the best so far.
        metric: the name of what it looks at.
        mode: what it takes for better: "min" or "max".
        metric_kind: "loss" or "score", as far as the metric's name tells.
        acts: what it does: "stops" the training, "keeps" the best weights, or "lowers" the rate.
        is_default: whether the mode is the one that it has where none is given.
        site: where it is made.
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
    """Something that was found in the graph of a loss, in the steps that were looked at.

    Attributes:
        kind: "twice" (a loss is given what it would compute itself), "pairs" (output and target
            were broadcast against one another), "nan" (some were replaced), "skipped" (some
            losses were none, and the script went on without a step), "labels" (of how many
            classes, and how they lie in the column that they come from), "padding" (is counted as a
            target), "bounded" (a loss takes scores behind ReLU or tanh), "single" (softmax is
            taken of a single score), "undivided" (means of several batches were added up for a
            step), "cut" (a term ends in a tensor that is made in each step).
        site: the user's line, where torch could note it.
        count: in how many graphs.
        steps: up to which step.
        detail: such as {"outer": "cross_entropy", "inner": "softmax"}.
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
        site: where the user calls it.
        elements: numbers in its parameters.
        layers: how many modules of each class; "Dropout in LSTM" of those that drop within.
        has_convolutions, is_channels_last, is_compiled: what they say.
        wrapper: "DataParallel", "DistributedDataParallel", "FullyShardedDataParallel" or "".
        wrapper_options: such as {"find_unused_parameters": True}.
        unused_parameters: any parameter of it that had no gradient in some step; None if unknown.
        autocast: dtype of autocast in its training forward, "" without.
        inputs: shapes and dtypes of its inputs, as seen: [[shape, dtype], count].
        padding_share: of the places in its inputs, where those are sequences; None where they are
            not.
        lengths: how many lengths these sequences had, padding included.
        is_told: whether each call tells its layers if they train, as with Keras; the mode of the
            module then says nothing.
        evaluated_in_train_mode: where it was called without gradients, in train mode, although
            that changes what it computes (dropout, BatchNorm).
        trained_in_eval_mode: where it was called with gradients, then stepped, in eval mode.
        evaluated_with_grad: where it was called in eval mode with gradients enabled, and no
            backward came.
        evaluated_every: steps from one evaluation to the next, where there were always as many.
        first_weights, first_gradients: a number for the weights before the first step, and for the
            gradients that it was made with; equal ones are equal. None with a single rank, where
            ranks hold parts of the tensors, and where all gradients were zero.
        not_finite: names of parameters and buffers with NaN or infinity at the end of what was
            seen, or before an evaluation or a save.
        moving_norms: names of BatchNorm layers that were in training when an optimizer stepped,
            though none of their parameters trains.
        not_stepped: names of parameters that had a gradient when an optimizer stepped, and that
            none steps; only of a model of which one steps others.
        moved: likewise, but changed by the script itself, as a moving average is; with moved_share,
            their share of all numbers that had a gradient.
        misses_first: those come before all that one steps, as where only a head is meant to train.
        unregistered: names and shapes of parameters that a loss has reached, and that belong to no
            module that was called, nor to an optimizer: such as those of layers in a list.
        repeats: how often it was called as in the call before, with the same weights and random
            state, of its first `repeats_of` calls.
        subnormal_share: the largest share that numbers too small for full precision had in one of
            its parameters, buffers or gradients on a CPU that computes with them.
        frozen_share: share of the forward time in leading modules without trainable parameters.
        pool_after: names of (activation, pooling) pairs that could change places.
        pool_site: the line of the first of them.
        pool_parts, pool_ms: names of the modules whose own time they take, and that time of forward
            and backward, per step; None where it was not seen, as on a GPU.
        device_type: where its parameters are: "cpu", "cuda".
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
    """A module that nothing trains, and that the script calls by itself in each step.

    Attributes:
        kind: its class.
        site: where it was called first.
        ms: that it takes of a step.
    """

    kind: str
    site: Site | None
    ms: float


@dataclass
class Cell:
    """A recurrent cell that is called in a loop over parts of one tensor.

    Attributes:
        kind: such as "LSTMCell".
        site: where.
        length: of the loop.
        ms: that its calls take in the forward of a step.
    """

    kind: str
    site: Site | None
    length: int
    ms: float


@dataclass
class OverBatch:
    """A layer that takes the sequence first, and got the samples of a shuffled batch there; or a
    softmax over them.

    Attributes:
        kind: such as "LSTM", "MultiheadAttention" or "log_softmax".
        site: where.
        shape: of what it got.
        count: of such calls.
        by_targets: whether it is known by targets that are the inputs one place on, in each row.
    """

    kind: str
    site: Site | None
    shape: list[int] = field(default_factory=list)
    count: int = 0
    by_targets: bool = False


@dataclass
class Unfrozen:
    """Parameters that train, though the script has set something to False that looks like freezing.

    Attributes:
        name: of the attribute, such as "require_grad".
        kind: the class of a module that has been given `requires_grad`; "" where it is misspelt.
        site: where it is set, as far as that was found.
        parameters, elements: how many tensors, and numbers in them.
        names: of the first of them.
    """

    name: str
    kind: str
    site: Site | None = None
    parameters: int = 0
    elements: int = 0
    names: list[str] = field(default_factory=list)


@dataclass
class HeldOutNodes:
    """Nodes of a graph that are held out by their name, and that a loss of classes is taken over.

    Attributes:
        name: of the mask, or of the numbers of nodes, as the script has it.
        in_loss: how many of them have a target in the loss.
        nodes: how many targets it has.
        site: of the backward pass.
    """

    name: str
    in_loss: int
    nodes: int
    site: Site | None = None


@dataclass
class SharedFolds:
    """Folds of cross-validation that one model is trained on, one after another.

    Attributes:
        kind: the class of scikit-learn that splits.
        folds: how many.
        model: the class of the model.
        site: the loop over the folds.
    """

    kind: str
    folds: int
    model: str
    site: Site | None = None


@dataclass
class StateLoad:
    """A state dict that is loaded, and changes nothing.

    Attributes:
        kind: "unmatched" where it has no name of the module's, "own" where it has the module's own
            tensors, which have moved since it was taken, "kept" where those are kept to be loaded
            later.
        model: the class of the module.
        parameters: how many tensors it has.
        site: where it is loaded.
        taken_at: where it was taken from the module; None where it has other names.
        steps: taken since then.
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
    """A line that puts together what it has put together before, with more.

    Attributes:
        words: the function, such as "torch.cat".
        site: the line.
        numbers: that the result had when it was last looked at.
        more: numbers that come with each step.
        ms: per step, in the steps that were looked at.
        at: the last of these steps.
        bytes: of a number.
        is_list: whether a list of Python's is read as a whole, and not an array put together.
        pieces: tensors or arrays that come with each step to those which are put together.
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
    """Gradients that a loss has computed for parameters which its own optimizer does not step.

    Attributes:
        fate: what became of them: "zeroed" before their optimizer stepped, "added" to its own
            gradients, or "kept", where no optimizer steps these parameters.
        model: the class of the model that has them; "" where that is not known.
        called_at: where that is called.
        backward_at: the backward pass that computes them.
        stepped_at: the step of the optimizer that this pass was for.
        passes_on: whether the gradient comes through this model to what is stepped.
        parameters: tensors of that model, or of its optimizer.
        elements: numbers in those that were reached.
        share: of the numbers that all backward passes of a step compute gradients for.
        count: how often that was seen.
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
    """A generator that is set back to the same seed while training goes on.

    Attributes:
        kind: what seeds it, such as "numpy.random.default_rng"; or what has drawn the same again,
            as "torch.randperm" an order.
        site: where.
        steps: that had ended each time.
        seed: of the torch.Generator that the same numbers were drawn from; None of what seeds.
    """

    kind: str
    site: Site | None = None
    steps: list[int] = field(default_factory=list)
    seed: int | None = None


@dataclass
class Teacher:
    """A model that is called in each step and never trained, and whose layers are in train mode.

    Attributes:
        kind: its class, as module.Name.
        site: where it is called.
        layers: how many of its layers compute otherwise in train mode, by class.
        moved: BatchNorms of which the running statistics have moved in four steps.
        dropped: share of the numbers that its first dropout has set to zero; None without one.
    """

    kind: str
    site: Site | None = None
    layers: dict[str, int] = field(default_factory=dict)
    moved: int = 0
    dropped: float | None = None


@dataclass
class LeakedTarget:
    """A column of what the model gets that is the target which its loss compares with.

    Attributes:
        column: its place in a sample whose dimensions are flattened.
        factor: by which it has to be multiplied to follow the target; 1 for a copy.
        samples: in how many that is so: in all that were looked at.
        values: how many different ones the target has in these.
        shape: of a sample.
        site: where the model is called.
    """

    column: int
    factor: float
    samples: int
    values: int
    shape: list[int] = field(default_factory=list)
    site: Site | None = None


@dataclass
class SeenAhead:
    """A model that is trained to tell the next token, and whose outputs change with that token.

    Attributes:
        kind: its class, as module.Name.
        site: where it is called.
        at: the output that was looked at, by its place in the sequence.
        length: of the sequence, in tokens.
        targets: how many were compared with the tokens: all were the next one.
        change: of the output, in terms of its spread over the classes.
        layer: name of the layer in which the change begins; "" where it is the model itself.
        layer_kind: its class; "" where none can be told.
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
    """An optimizer that is made again and again for parameters which train on.

    Attributes:
        kind: its class, as module.Name.
        site: where it is made.
        parameters: how many tensors train.
        times: how often it was made again.
        until: after how many steps of the training that was counted.
        each: steps that one of them takes, at the median.
        memory: steps that the longest of its averages spans.
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
    """A copy of a trained model that gives its targets, and is as it was before the first step.

    Attributes:
        kind: its class, as module.Name.
        site: where it is called.
        steps: after which its weights were still those of the beginning.
    """

    kind: str
    site: Site | None = None
    steps: int = 0


@dataclass
class EqualViews:
    """Pictures that a trained model gets twice in each step, bitwise the same in other tensors.

    Attributes:
        kind: its class, as module.Name.
        site: where it is called.
        samples: how many pictures are the same.
        steps: in which that was seen.
        is_batch: whether they are both halves of one batch, and not two calls.
    """

    kind: str
    site: Site | None = None
    samples: int = 0
    steps: int = 0
    is_batch: bool = False


@dataclass
class KeptGraphs:
    """A name of the script's that holds on to the graphs of past steps.

    Attributes:
        name: as the script calls it, such as "losses" or "meter.total".
        site: the line that adds to it; None where it was not found.
        is_list: whether it is a list of tensors; else a sum.
        steps: of so many steps it has something, when it was last looked at.
        nodes: of graphs that it held then.
    """

    name: str
    site: Site | None
    is_list: bool
    steps: int
    nodes: int


@dataclass
class Growth:
    """By how much more a line takes with each step than in the step before.

    Attributes:
        us: microseconds, with their 95% interval from low to high.
    """

    us: float
    low: float
    high: float


@dataclass
class Line:
    """A line of the user's that steps spend time in, what it calls of libraries included.

    Attributes:
        site: the line.
        ms: per step.
        lanes_ms: the same by lane.
        words: what it calls, as it is written there, such as "torch.quantile".
        callers: the user's lines that led to it most often, from the inside.
        within: the module that took most of it, such as "BertLayer"; else, of a trainer's or a
            DataLoader's own code, the function.
        trainer: the package that runs under a line that only starts it, such as "lightning"; ""
            for none.
        samples: of the script that were taken there: the fewer, the rougher is `ms`.
        growth: where it takes more and more; None where it does not.
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
    """Modules of one class and place in the model, and the time of a step without those in them.

    Attributes:
        name: of the module, such as "head"; of several with a star for what differs, such as
            "layers.*.attention". "" for the model itself.
        kind: their class; "" for what lies in no module, such as a loss that is a function.
        count: how many.
        forward_ms, backward_ms: per step.
        operator: what takes most of their backward, as autograd calls it, such as "Bmm"; "" where
            none does, and for the layers of torch.
    """

    name: str
    kind: str
    count: int = 0
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    operator: str = ""

    @property
    def words(self) -> str:
        """Which they are."""
        if not self.kind:
            return "outside of the model's modules"
        several = f"{self.count} " if self.count > 1 else ""
        return f"{self.name or 'the model itself'} ({several}{self.kind})"


@dataclass
class OtherThread:
    """A thread of the script's beside the one that steps.

    Attributes:
        name: as Python calls it.
        site: the user's line that it is at most often, while it does not wait for another thread.
        busy: share of the looks in which it did not wait.
        share: of those in which it was at this line.
    """

    name: str
    site: Site
    busy: float
    share: float


@dataclass
class Ablation:
    """What a step takes with one lane taken out of it, measured in the running script.

    Attributes:
        ratio: time as it is over time without the lane, with its 95% interval from low to high.
        floor: how far from 1 that ratio would lie by noise alone.
        pairs: quadruples of blocks that were run; 0 where the lane's own time says all.
        step_ms, without_ms: per step, at the median of the blocks as it is, and without.
        returns_ms: the most per step that any cure of this lane can return.
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
    """What a GPU did in a step, as torch's profiler has seen it in some.

    Attributes:
        steps: that were profiled.
        busy_ms: per step in which anything ran on it; what ran at the same time counts once.
        lanes_ms: of kernels, by the lane in which the host has queued them: "forward" (all that is
            in neither of the others), "backward", "optimizer".
        to_device_ms, to_host_ms: of copies from and to the host.
        is_pageable: whether any of those to the device came from memory that is not pinned.
        kernels: the names of those that take most, with ms per step, the longest first.
        launches: kernels and copies per step.
        step_ms: what a step took while it was profiled, which is longer where the host is slow.
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
    """A call whose value is not used and that left the training alone, and a step without it.

    Attributes:
        site: where it is made.
        words: what is called, as it is written there.
        measured: what steps take without it.
        first: the line of the first assignment before it that it alone reads, else its own.
    """

    site: Site
    words: str
    measured: Ablation
    first: int = 0

    def ms(self) -> tuple[float, float, float]:
        """What it costs a step, with the ends of the 95% interval: low, as measured, high."""
        measured = self.measured
        low, middle, high = (
            measured.step_ms * (1 - 1 / r) for r in (measured.low, measured.ratio, measured.high)
        )
        return low, middle, high

    @property
    def is_proven(self) -> bool:
        """Whether a step is shorter without it, beyond the noise."""
        return self.measured.low > 1 + self.measured.floor


@dataclass
class Lapse:
    """What was seen of a script after its steps were timed, in epochs that ended early.

    Attributes:
        seconds: that it took.
        steps: of optimizers in it.
        epochs: that ended in it.
        parts: what was seen beside training: "validation", "checkpoint", "schedule".
        cut: which loaders and loops ended early: the line, how many batches or turns ran in the
            epoch that was cut first, and how many there would have been; None where no one knows.
        steps_schedules: whether any line of the script's files steps a schedule, be it in a later
            epoch.
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
        versions: of Python and of the packages that matter.
        rank, world_size: of this process.
        device: where the model computes, such as "cpu" or "cuda:0".
        threads: torch's, and usable_cpus, of this process.
        steps: optimizer steps that were seen.
        step_ms: durations of those steps in order, evaluation and saving between them left out.
        lanes_ms: per step, by the names of measure.LANES; None where a lane could not be seen.
        memory_mb: resident memory at each of `memory_at` steps.
        own_mb: what of it belongs to no file, at the same steps.
        graph_nodes: [step, nodes of the graphs that were alive], where memory had grown.
        graph_site: the line that keeps them.
        page_faults: minor faults per step.
        major_faults: per step.
        runnable: processes and threads of this job that could run, per usable CPU.
        job_mb: memory that belongs to no file, of this process and its workers together, looked at
            now and then, at each of `job_at` steps, once a second at most.
        swapped_mb: how much of this process and its workers had gone to swap, at the most.
        device_held_mb, device_peak_mb, device_total_mb: of the GPU: held by tensors between steps,
            at the most, and there is.
        device_failures: how often it had no memory left.
        device_time: what the GPU did in a step; None where that was not profiled.
        backbones: on a CPU, modules that nothing trains and that steps call on samples.
        tables: that batches are rows of, where no DataLoader gives them.
        loss_looks: how many graphs of losses were looked at, and what was found in_losses.
        cells: recurrent ones that a loop in Python calls.
        over_batch: layers that run over the samples of a batch.
        softmaxes: those that are taken over the samples of a batch.
        unfrozen: parameters that the script means to freeze, and that train.
        held_out_nodes: nodes of a graph that are held out, and enter the loss.
        shared_folds: loops of cross-validation that train one model on all folds.
        state_loads: state dicts that are loaded and change nothing.
        dropouts: where a model calls torch.nn.functional.dropout without `training=`.
        growing: what is put together in each step, longer each time.
        gradient_uses: how many backward passes were followed to the step that uses their gradients,
            where several optimizers or models take part; unused_gradients: what no step used.
        teachers: models that are called in each step in train mode, though nothing trains them.
        remade: optimizers that are made again for the same parameters, their averages lost.
        leaked_targets: columns of the model's input that are its target.
        seen_ahead: models that see the token which they are to tell.
        still_targets: copies of a trained model that give its targets and never move.
        equal_views: pictures that a model gets twice in a step, bitwise the same.
        kept_graphs: names of the script's that hold on to the graphs of past steps.
        repeated_seeds: generators that draw the same numbers again; None where no one looked.
        schedules: of learning rates.
        monitors: what callbacks of trainers look at, or the script itself, to keep the best.
        epoch_loops: loops of the user's own that go through epochs: the line, and how many turns.
        run_steps: that the script would take, by the lengths of the loops that it is in; None where
            one of them has none.
        switched_on: what was on for all of torch at the first backward pass, such as
            "detect_anomaly"; None without one.
        evaluation_site: where a model was called to evaluate.
        saved: what was written with torch.save: {"path", "step", "keys", "bytes", "is_there"} of
            each: the absolute path, or "" for no file; its size, None where that was not seen, and
            whether it was there at the end; with "contents", where there are several ranks, a
            number for its tensors, None without any.
        compiles: [step, graphs that torch.compile had made by then, seconds that took], from the
            second step on; empty if the script compiles nothing. The number of graphs may stay 0.
        openmp: names of the OpenMP libraries that the process has loaded.
        openmp_settings: environment variables that are meant for one, at the end.
        gpu_memory_mb: by the GPU's uuid, the most that torch held on each on which this process
            has a context; None where torch computes on no GPU.
        shm_free_mb: free in /dev/shm, through which workers hand over batches.
        disk_free_mb: free where `saved` lie; None without any.
        machine_cpus: CPUs that all ranks of this machine may use together.
        gpus: names of the GPUs that torch could use here, whether the script does or not.
        bf16_units: what computes in bf16 on the device at hand, such as "AMX-bf16"; "" for nothing.
        available_mb: memory that the job could still take.
        matmul_precision: torch.get_float32_matmul_precision(), at the last step.
        cudnn_benchmark: torch.backends.cudnn.benchmark, at the last step.
        ended: "done", "stopped" (enough was seen), "failed", "no steps"; "running" in what is
            written meanwhile, and stays of a script that was killed.
        error: the script's own error, as Python prints it.
        added_us_per_step: what observing has cost, counted directly.
        start_s: from the beginning to the end of its first step; None before that.
        added_once_ms: beside that, of looks in the first steps and at some later ones; where less
            than two seconds were watched, of all looks.
        lines: the user's lines that steps spend most time in, the dearest first; empty where no one
            looked at them.
        modules: those in which forward and backward spend most time, on a CPU, the dearest first;
            empty where they were not looked at.
        other_threads: of the script, that run code of the user's while it steps, the busiest
            first.
        explained: share of the time of steps that one of all lines, or a trainer's function, is
            known for; None where no one looked, or too seldom.
        ablations: what steps would take without a lane: "input", "log" (print, logging,
            summaries), "item" (waiting for a device to read a number), "sync", "evaluation",
            "saving". Empty where nothing was taken out.
        left_out: calls that were left out of some steps, and what these took then.
        checkpointed_mb: what backward computes again, and would else be kept by forward, per
            backward pass; None where nothing is, or that was not seen.
        lapse: what a time-lapse has shown beside; None without one.
        notes: what could not be seen, and why.
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
        """The note that the script has become another program; "" where it has not."""
        return next((note for note in self.notes if note.startswith(BECAME)), "")

    @property
    def inputs(self) -> list[Loader | Table]:
        """What has given batches."""
        return [*self.loaders, *self.tables]

    @property
    def workers(self) -> int | None:
        """Of the loader that is trained on; None where there is none."""
        return next((loader.num_workers for loader in self.loaders if loader.in_training), None)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    @classmethod
    def of(cls, data: dict[str, Any]) -> Observation:
        """From plain data.

        Raises:
            pydantic.ValidationError: it does not fit.
        """
        return _adapter().validate_python(data)


@cache
def _adapter() -> TypeAdapter[Observation]:
    # Made once: it takes longer than reading an Observation.
    return TypeAdapter(Observation)
