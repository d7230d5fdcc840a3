"""tf.data in the form of it that was fastest for each kind of data.

The dataset repeats forever, so that no pass pays for building it. Text and records are shuffled in
windows of `WINDOW` rows as whole tensors of strings, which takes half the time of `shuffle` and its
buffer; files are read in turn, several at once. Numbers of parallel calls are given, because
AUTOTUNE was slower on one and two cores.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import input_job

ARGUMENTS = input_job.start()
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"

import tensorflow as tf  # noqa: E402

SIZE = input_job.BATCH[ARGUMENTS.kind]
WINDOW = 4 * SIZE
FIELDS = input_job.NUMBERS + input_job.HASHED
CALLS = 2 * ARGUMENTS.threads
BUFFER = 1 << 20  # bytes


def lines(files: tf.Tensor) -> tf.data.Dataset:
    return tf.data.TextLineDataset(files, buffer_size=BUFFER)


def records(files: tf.Tensor) -> tf.data.Dataset:
    return tf.data.TFRecordDataset(files, buffer_size=BUFFER)


def windows(read: Callable[[tf.Tensor], tf.data.Dataset]) -> tf.data.Dataset:
    """Shuffled batches of strings."""
    pieces = tf.data.Dataset.from_tensor_slices(input_job.files(ARGUMENTS)).interleave(
        lambda file: read(file).batch(WINDOW // 4),
        cycle_length=CALLS,
        num_parallel_calls=ARGUMENTS.threads,
        deterministic=False,
    )
    return pieces.rebatch(WINDOW).map(tf.random.shuffle).rebatch(SIZE)


# -- LibSVM --------------------------------------------------------------------------------------


def libsvm_lines() -> tf.data.Dataset:
    """Line by line, as most examples have it."""
    read = lines(input_job.files(ARGUMENTS)).shuffle(WINDOW)
    return read.map(parse_line, num_parallel_calls=CALLS).batch(SIZE)


def parse_line(line: tf.Tensor) -> tuple[tf.Tensor, ...]:
    fields = tf.strings.split([line], " ").values
    pairs = tf.reshape(tf.strings.split(fields[1:], ":").values, [FIELDS, 2])
    return (
        tf.strings.to_number(fields[0], tf.int64),
        tf.strings.to_number(pairs[:, 0], tf.int64),
        tf.strings.to_number(pairs[:, 1], tf.float32),
    )


def libsvm_batches() -> tf.data.Dataset:
    """Whole batches: the CSV parser cuts lines at spaces, and then each column at colons."""
    return windows(lines).map(parse_lines, num_parallel_calls=CALLS)


def parse_lines(batch: tf.Tensor) -> tuple[tf.Tensor, ...]:
    number, text = tf.constant([], tf.int64), tf.constant([], tf.string)
    label, *fields = tf.io.decode_csv(
        batch, [number] + [text] * FIELDS, field_delim=" ", use_quote_delim=False
    )
    pair = [number, tf.constant([], tf.float32)]
    pairs = [
        tf.io.decode_csv(field, pair, field_delim=":", use_quote_delim=False) for field in fields
    ]
    ids, values = zip(*pairs, strict=True)
    return label, tf.stack(ids, axis=1), tf.stack(values, axis=1)


# -- TFRecord, Criteo ----------------------------------------------------------------------------


def tfrecord() -> tf.data.Dataset:
    return windows(records).map(parse_examples, num_parallel_calls=CALLS)


def parse_examples(batch: tf.Tensor) -> tuple[tf.Tensor, ...]:
    features = {
        "label": tf.io.FixedLenFeature([], tf.int64),
        "ids": tf.io.FixedLenFeature([FIELDS], tf.int64),
        "values": tf.io.FixedLenFeature([FIELDS], tf.float32),
    }
    parsed = tf.io.parse_example(batch, features)
    return parsed["label"], parsed["ids"], parsed["values"]


def criteo() -> tf.data.Dataset:
    return windows(lines).map(parse_criteo, num_parallel_calls=CALLS)


def parse_criteo(batch: tf.Tensor) -> tuple[tf.Tensor, ...]:
    defaults = [0.0] * (1 + input_job.NUMBERS) + ["00000000"] * input_job.HASHED
    columns = tf.io.decode_csv(batch, defaults, field_delim="\t", use_quote_delim=False)
    numbers = tf.stack(columns[1 : 1 + input_job.NUMBERS], axis=1)
    texts = tf.stack(columns[1 + input_job.NUMBERS :], axis=1)
    return columns[0], numbers, hexadecimal(texts)


def hexadecimal(texts: tf.Tensor) -> tf.Tensor:
    """Eight digits each as numbers: all digits at once in the bytes of an int64."""
    digits = tf.io.decode_raw(texts, tf.int64, fixed_length=8, little_endian=False)[..., 0]
    letters = tf.bitwise.bitwise_and(
        tf.bitwise.right_shift(digits, int64(6)), int64(0x0101010101010101)
    )
    numbers = tf.bitwise.bitwise_and(digits, int64(0x0F0F0F0F0F0F0F0F)) + 9 * letters
    for shift, mask in ((4, 0x00FF00FF00FF00FF), (8, 0x0000FFFF0000FFFF), (16, 0xFFFFFFFF)):
        pairs = tf.bitwise.bitwise_or(numbers, tf.bitwise.right_shift(numbers, int64(shift)))
        numbers = tf.bitwise.bitwise_and(pairs, int64(mask))
    return numbers


def int64(number: int) -> tf.Tensor:
    return tf.constant(number, tf.int64)


# -- images, arrays ------------------------------------------------------------------------------


def jpeg() -> tf.data.Dataset:
    paths, labels = input_job.image_paths(ARGUMENTS)
    files = tf.data.Dataset.from_tensor_slices((paths, labels)).shuffle(len(paths))
    return files.map(decode, num_parallel_calls=CALLS).batch(SIZE)


def decode(path: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, ...]:
    half = tf.io.decode_jpeg(tf.io.read_file(path), channels=3, ratio=2)
    pixels = tf.image.resize(half, [input_job.PIXELS, input_job.PIXELS])
    return label, tf.cast(pixels + 0.5, tf.uint8)


def memory() -> tf.data.Dataset:
    """Shuffled numbers of rows, and a gather for each batch."""
    images, labels = map(tf.constant, input_job.memory(ARGUMENTS))
    numbers = tf.range(len(labels), dtype=tf.int64)
    orders = tf.data.Dataset.range(1).map(lambda _: tf.random.shuffle(numbers))
    return orders.rebatch(SIZE).map(
        lambda rows: (tf.gather(labels, rows), tf.gather(images, rows)), num_parallel_calls=CALLS
    )


FORMS = {
    ("libsvm", "lines"): libsvm_lines,
    ("libsvm", "batches"): libsvm_batches,
    ("tfrecord", ""): tfrecord,
    ("criteo", ""): criteo,
    ("jpeg", ""): jpeg,
    ("memory", ""): memory,
}


def open_files() -> input_job.Pass:
    options = tf.data.Options()
    options.deterministic = False
    options.threading.private_threadpool_size = ARGUMENTS.threads
    dataset = FORMS[ARGUMENTS.kind, ARGUMENTS.form]().with_options(options)
    batches = iter(dataset.repeat().prefetch(CALLS))
    rows = input_job.known_rows(ARGUMENTS)

    def one_pass(epoch: int) -> Iterator[input_job.Batch]:
        given = 0
        while given < rows:
            batch = next(batches)
            given += batch[0].shape[0]
            yield batch

    return one_pass


def main() -> None:
    tf.config.threading.set_intra_op_parallelism_threads(ARGUMENTS.threads)
    tf.config.threading.set_inter_op_parallelism_threads(ARGUMENTS.threads)
    input_job.measure(ARGUMENTS, open_files)


if __name__ == "__main__":
    main()
