"""A model's facts about its data: names of classes, and the conversion of images to its input.

The facts are stored with the model as JSON: in the metadata of model files and checkpoints, and in
`.keras` files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from flatout.data import (
    TEXTS,
    Batch,
    Map,
    Mixture,
    Normalization,
    Pipeline,
    Schema,
    Source,
    as_schema,
    dataset_meanings,
    digest_of,
    holds_bytes,
    is_stream,
    listed,
    named_tensors,
    takes_rng,
    unlike_meaning,
)
from flatout.errors import CheckpointError, DataError
from flatout.train.job_facts import Facts, fact
from flatout.train.model_ids import ModelIds, make_room, with_ids

KEY = "flatout.signature"
_IMAGES = "images"


@dataclass(frozen=True)
class Signature:
    """Facts about the data that a model was trained on.

    Attributes:
        classes: names of classes by number; None where the data named none.
        images: a schema of `flatout.data.images` by which a file becomes an input. None for other
            data, or where the user's own functions without randomness took part.
        pixels: normalization of bytes before the model; None where the model gets bytes as they
            are.
        meanings: the rules by which values become numbers, as in `data.Pipeline.meanings`.
        ids: map from the ids of columns to rows of the model's tables.
    """

    classes: tuple[str, ...] | None = None
    images: Schema | None = None
    pixels: Normalization | None = None
    meanings: Mapping[str, str] = field(default_factory=dict)
    ids: ModelIds | None = None

    def metadata(self) -> dict[str, str]:
        """Return the signature as text for a model file; empty where no facts are known."""
        if self == Signature():
            return {}
        result: dict[str, Any] = {}
        if self.classes is not None:
            result["classes"] = list(self.classes)
        if self.images is not None:
            result["images"] = self.images.model_dump(mode="json", exclude_defaults=True)
        if self.pixels is not None:
            result["mean"], result["std"] = list(self.pixels.mean), list(self.pixels.std)
        if self.meanings:
            result["meanings"] = dict(self.meanings)
        if self.ids is not None:
            result["ids"] = self.ids.digest
        return {KEY: json.dumps(result, ensure_ascii=False)}

    @classmethod
    def of(
        cls, metadata: Mapping[str, str], where: str | None = None, ids: ModelIds | None = None
    ) -> Signature | None:
        """Read a signature from a model file's metadata; None where the metadata have none."""
        text = metadata.get(KEY)
        if text is None:
            return None
        try:
            data = json.loads(text)
            _check_ids(data.get("ids"), ids, where)
            classes, images = data.get("classes"), data.get("images")
            return cls(
                None if classes is None else as_classes(classes),
                None if images is None else as_schema(images, _IMAGES),
                Normalization.of(data["mean"], data["std"]) if "mean" in data else None,
                _meanings(data),
                ids if "ids" in data else None,
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"the file's description of the model's data cannot be read: {error}", where=where
            ) from error


def _meanings(data: Mapping[str, Any]) -> dict[str, str]:
    earlier = {f"{TEXTS} {name!r}": digest for name, digest in data.get("texts", {}).items()}
    return {str(key): str(value) for key, value in (earlier | data.get("meanings", {})).items()}


def _check_ids(expected: str | None, ids: ModelIds | None, where: str | None) -> None:
    if expected is None or (ids is not None and ids.digest == expected):
        return
    if ids is None:
        raise CheckpointError(
            "the model needs its map of ids, which was not found",
            where=where,
            do="keep the file that ends in .ids.safetensors in the folder of the model's file",
        )
    raise CheckpointError(
        f"the map of ids is of another model: {ids.digest}, expected {expected}",
        where=where,
        do="keep both files as they were saved together; Trainer(model, warm_start=run) takes both "
        "from a run",
    )


def as_classes(names: Any) -> tuple[str, ...]:
    """Check and return names of classes by number."""
    result = tuple(names) if isinstance(names, (list, tuple)) else ()
    if not result or not all(isinstance(name, str) for name in result):
        raise DataError(f"classes: expected a list of names, found {names!r}")
    if len(set(result)) < len(result):
        raise DataError(f"classes: expected different names, found {listed(result)}")
    return result


def with_room(
    metadata: Mapping[str, str], path: str, model: nn.Module, optimizer: Any
) -> Signature | None:
    """Read the signature of a model file, and give the model's tables the rows of its ids."""
    result = Signature.of(metadata, path, ModelIds.load(path))
    if result is None or result.ids is None:
        return result
    return replace(result, ids=make_room(model, result.ids, path, optimizer))


def signature_of(
    source: Source, known: Signature | None, takes_bytes: Callable[[Batch], bool]
) -> Signature:
    """Return the signature of a model after training on `source`, given the earlier signature."""
    before = known or Signature()
    if not isinstance(source, Pipeline):
        return replace(before, meanings={**before.meanings, **_meanings_of(source)})
    meanings = {**source.meanings, **before.meanings}
    return replace(_learned(source, before, takes_bytes), meanings=meanings, ids=before.ids)


def _learned(
    source: Pipeline, before: Signature, takes_bytes: Callable[[Batch], bool]
) -> Signature:
    classes = before.classes or source.classes
    written = source.normalization
    schema = schema_of_images(source)
    if written is None and schema is None:
        return Signature(classes, before.images, before.pixels)
    if is_stream(source.origin):  # reading before ranks divide the stream would lose samples
        return Signature(classes, pixels=written)
    batch = next(iter(source.in_bytes.peek(1)), None)
    if batch is None or not _has_bytes(batch):
        if written is not None and batch is not None:
            raise DataError(
                "normalize is for uint8 images: scaling to 0..1 is its part, and the inputs are "
                f"{_dtypes(batch)}",
                do="leave it out, or let the functions before it give uint8",
            )
        return Signature(classes)
    if written is not None:
        pixels: Normalization | None = written
    elif before.pixels is not None or before.images is not None:
        pixels = before.pixels
    else:
        pixels = None if takes_bytes(batch) else Normalization()
    return Signature(classes, schema if _is_plain(source) else None, pixels)


def trained(source: Source, signature: Signature) -> Source:
    """Prepare training data as `to_evaluate` does; explain errors about unknown classes."""
    try:
        return to_evaluate(source, signature)
    except DataError as error:
        if isinstance(source, Pipeline) and set(source.classes or ()) - set(
            signature.classes or ()
        ):
            do = "set trainer.classes = None, so that these data name the classes from now on"
            raise DataError(error.what, where=error.where, do=do) from None
        raise


def to_evaluate(source: Source, signature: Signature) -> Source:
    """Return the source with the model's class numbers, and in bytes if the model normalizes."""
    source = with_ids(source, signature.ids)
    _check_meanings(source, signature)
    if not isinstance(source, Pipeline):
        return source
    _check_channels(source, signature)
    if signature.classes is not None:
        source = source.with_classes(signature.classes)
    written = source.normalization
    if written is None or signature.pixels is None:
        return source
    if written != signature.pixels:
        raise DataError(
            f"the images are {written.words()}, and the model was trained on images "
            f"{signature.pixels.words()}",
            do="leave normalize out: what the model was trained with is used",
        )
    return source.in_bytes


def _meanings_of(source: Source) -> dict[str, str]:
    if isinstance(source, Pipeline):
        return source.meanings
    return dataset_meanings(next(iter(getattr(source, "own_parts", ())), None))


def _check_meanings(source: Source, signature: Signature) -> None:
    """Refuse numbers with another meaning than in training; no other check would find them."""
    data = "the data that the model was trained on"
    words = unlike_meaning(signature.meanings, _meanings_of(source), data)
    if words is None:
        return
    do = "read them by the schema of the training data: schema=train.schema, or the file that its "
    do += "schema.dump(path) has written"
    if not isinstance(source, Pipeline):
        do = "give both Datasets the same classes, such as an empty folder for a class that has no "
        do += "sample (ImageFolder(..., allow_empty=True))"
    raise DataError(words, where=source.describe(), do=do)


def check_bytes(source: Source, signature: Signature, takes_bytes: Callable[[Batch], bool]) -> None:
    """Raise where the model would get bytes, but was trained on other inputs."""
    known = signature.images is not None or signature.pixels is not None
    if known or not isinstance(source, Pipeline) or schema_of_images(source) is None:
        return
    batch = next(iter(source.peek(1)), None)
    if batch is not None and _has_bytes(batch) and not takes_bytes(batch):
        raise DataError(
            "the images are uint8, and the model was trained on other inputs",
            where=source.describe(),
            do="add the functions that followed the images in the training data, or "
            ".normalize(mean, std) if those functions only scaled the images",
        )


def words_of(signature: Signature, source: Source) -> str | None:
    """Describe the conversion of a source's images in one line; None without one."""
    if not isinstance(source, Pipeline) or schema_of_images(source) is None:
        return None
    if signature.pixels is None:
        return None
    hint = "; .normalize(mean, std) for a model's own statistics"
    return f"uint8 images are {signature.pixels.words()}" + (
        hint if signature.pixels == Normalization() and source.normalization is None else ""
    )


def renumbered_words(asked: Source, got: Source) -> str | None:
    """Say in one line that a source's classes were renumbered; None if they were not."""
    if not isinstance(asked, Pipeline) or not isinstance(got, Pipeline):
        return None
    if asked.classes == got.classes or asked.classes is None or got.classes is None:
        return None
    missing = [name for name in got.classes if name not in asked.classes]
    without = f"; without {listed(missing)}" if missing else ""
    return f"classes have the model's numbers, 0 to {len(got.classes) - 1}{without}"


def schema_of_images(source: Pipeline) -> Schema | None:
    """Return the schema by which a pipeline reads image files; None over other data."""
    if isinstance(source.origin, Mixture):
        first, *others = [schema_of_images(part) for part in source.origin.parts]
        return first if all(other == first for other in others) else None
    schema = getattr(source.origin, "schema", None)
    if not isinstance(schema, Schema) or schema.format != _IMAGES:
        return None
    options = {name: value for name, value in schema.options.items() if name != "classes"}
    return Schema(format=_IMAGES, columns=(schema["image"],), options=options)


def _is_plain(source: Pipeline) -> bool:
    parts = source.origin.parts if isinstance(source.origin, Mixture) else ()
    functions = [stage.function for stage in source.stages if isinstance(stage, Map)]
    return all(map(takes_rng, functions)) and all(map(_is_plain, parts))


def facts_of(signature: Signature | None) -> Facts:
    """Return the facts in the signature that identify a job, for a resume to compare."""
    facts: Facts = {}
    if signature is not None and signature.classes is not None:
        facts["classes"] = fact(listed(signature.classes), digest_of(*signature.classes))
    for key, digest in ({} if signature is None else signature.meanings).items():
        if key.startswith(TEXTS):  # the digest of the data covers the other keys
            facts[f"texts of {key[len(TEXTS) + 2 : -1]}"] = fact(f"numbered as {digest}", digest)
    if signature is not None and signature.ids is not None:
        for name, value in signature.ids.maps.items():
            facts[f"ids of {name}"] = fact(f"{value.size:,} rows", value.digest)
    if signature is not None and signature.pixels is not None:
        facts["images"] = fact(signature.pixels.words(), repr(signature.pixels))
    return facts


def _check_channels(source: Pipeline, signature: Signature) -> None:
    schema, trained = schema_of_images(source), signature.images
    if schema is None or trained is None or not _is_plain(source):
        return
    own, theirs = (item["image"].shape[0] for item in (schema, trained))
    if own != theirs:
        raise DataError(
            f"the images have {own} channels, and the model was trained on {theirs}",
            do=f"pass channels={theirs} to images, which makes gray or RGB of any picture",
        )


def resized_words(signature: Signature, source: Source) -> str | None:
    """Say in one line that images have another size than in training; None if they have not."""
    if not isinstance(source, Pipeline) or signature.images is None:
        return None
    schema = schema_of_images(source)
    if schema is None or not _is_plain(source) or schema == signature.images:
        return None
    own, theirs = map(_look_words, (schema, signature.images))
    return None if own == theirs else f"images are {own}, and were {theirs} in training"


def _look_words(schema: Schema) -> str:
    shape = "x".join(map(str, schema["image"].shape))
    options = schema.options
    how = f" by {options['resize']}" if options.get("resize", "stretch") != "stretch" else ""
    return f"{shape}{how}{', reduced' if options.get('reduced') else ''}"


def _has_bytes(batch: Batch) -> bool:
    return any(holds_bytes(tensor) for _, tensor in named_tensors("inputs", batch.inputs))


def _dtypes(batch: Batch) -> str:
    kinds = {str(t.dtype).removeprefix("torch.") for _, t in named_tensors("", batch.inputs)}
    return " and ".join(sorted(kinds))
