"""`flatout export`: plain safetensors, .keras, or a torch.export program, from any checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import typer
from typer import Argument

from flatout.cli.common import AsJson, option, print_json, with_options
from flatout.console import printable

Which = Literal["best", "last"]


@dataclass(frozen=True)
class ExportOptions:
    """Options of `flatout export`."""

    key: str | None = option(
        None, "Of a file of torch.save: which set of weights: state_dict_ema, generator, a.b."
    )
    prefix: str | None = option(
        None, "Keep only names that begin so, without it. Default: take off wrappers' prefixes."
    )
    best: bool = option(
        False, "Of a run: the best weights. Default where something tells the best."
    )
    last: bool = option(False, "Of a run: the weights of the last checkpoint.")
    overwrite: bool = option(False, "Replace the target.")
    model: str | None = option(None, "For .pt2: package.module:callable that returns the module.")
    inputs: list[str] | None = option(
        None, "For .pt2: shape of an input, 1x28x28 or 1x128:int64; once for each.", "--input"
    )


@with_options
def export(
    checkpoint: Annotated[
        str,
        Argument(
            help="A run, a checkpoint, .safetensors, a .pt, .pth, .bin or .ckpt of torch.save, or "
            "Keras' .keras, .h5 or .weights.h5."
        ),
    ],
    target: Annotated[
        str | None,
        Argument(
            help="A name in .safetensors or .pt2 (of Keras .keras or .weights.h5), or a folder. "
            "Default: beside the checkpoint."
        ),
    ] = None,
    *,
    options: ExportOptions,
    as_json: AsJson = False,
) -> None:
    """Write the weights of a checkpoint under the module's own names."""
    if options.best and options.last:
        raise typer.BadParameter("--best and --last are one or the other")
    which: Which | None = "best" if options.best else "last" if options.last else None
    if target is not None and target.endswith(".pt2"):
        _export_program(checkpoint, target, which, options, as_json)
        return
    if options.model is not None or options.inputs:
        raise typer.BadParameter("--model and --input are for a .pt2 target")
    from flatout.save.export import export as export_weights

    done = export_weights(
        checkpoint,
        target,
        which=which,
        key=options.key,
        prefix=options.prefix,
        overwrite=options.overwrite,
    )
    if as_json:
        print_json(done.as_dict())
        return
    if done.kept and which is None:
        _say("the run has two; the best is taken (--last for the other):")
        _say("\n".join(f"  {line}" for line in done.kept))
    _say(f"read {done.source}")
    if done.sets:
        _say(f"{done.sets} (--key KEY takes another)")
    elif done.key:
        _say(f"weights: {done.key}")
    _say(f"taken off: {' '.join(done.stripped) or 'nothing'}")
    if done.left_out:
        more = f", … {len(done.left_out) - 5:,} more" if len(done.left_out) > 5 else ""
        _say(f"left out: {', '.join(done.left_out[:5])}{more}")
    _say(f"{done.target}  {done.tensors:,} tensors, {done.bytes:,} bytes")
    _say(f"load it: {_loading(done.target)}")


def _export_program(
    checkpoint: str, target: str, which: Which | None, options: ExportOptions, as_json: bool
) -> None:
    if options.model is None or not options.inputs:
        raise typer.BadParameter("a .pt2 target needs --model and --input")
    from flatout.save import export_program_of

    program = export_program_of(
        checkpoint,
        target,
        options.model,
        options.inputs,
        which=which,
        key=options.key,
        prefix=options.prefix,
        overwrite=options.overwrite,
    )
    if as_json:
        print_json(program.as_dict())
        return
    _say(f"{program.target}  {program.bytes:,} bytes")
    _say(f"read back and compared with the model: {program.parity}")
    _say(f"load it: torch.export.load({program.target!r}).module()")


def _say(line: str) -> None:
    typer.echo(printable(line))


def _loading(target: str) -> str:
    if target.endswith(".keras"):
        return f"keras.saving.load_model({target!r})"
    if target.endswith(".weights.h5"):
        return f"model.load_weights({target!r})"
    return f"safetensors.torch.load_file({target!r})"
