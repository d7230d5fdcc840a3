"""Writes the TFRecord files of bench/input.py, by TensorFlow itself."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import tensorflow as tf


def example(label: int, ids: np.ndarray, values: np.ndarray) -> tf.train.Example:
    feature = {
        "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
        "ids": tf.train.Feature(int64_list=tf.train.Int64List(value=ids)),
        "values": tf.train.Feature(float_list=tf.train.FloatList(value=values)),
    }
    return tf.train.Example(features=tf.train.Features(feature=feature))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=Path, required=True, help="folder of part-*.npz")
    parser.add_argument("--to", type=Path, required=True)
    arguments = parser.parse_args()
    for part in sorted(arguments.rows.glob("part-*.npz")):
        with (
            np.load(part) as rows,
            tf.io.TFRecordWriter(str(arguments.to / part.with_suffix(".tfrecord").name)) as writer,
        ):
            columns = (rows["labels"], rows["ids"], rows["values"])
            for row in zip(*columns, strict=True):
                writer.write(example(*row).SerializeToString())
    arguments.out.write_text(json.dumps({}))


if __name__ == "__main__":
    main()
