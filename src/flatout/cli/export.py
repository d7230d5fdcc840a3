"""`flatout export`: plain safetensors, .keras, or a torch.export program, from any checkpoint."""

from __future__ import annotations

from typing import Annotated, Literal

import typer
from typer import Argument, Option

from flatout.cli.common import AsJson, print_json
from flatout.console import printable


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
    key: Annotated[
        str | None,
        Option(
            help="Of a file of torch.save: which set of weights: state_dict_ema, generator, a.b."
        ),
    ] = None,
    prefix: Annotated[
        str | None,
        Option(
            help="Keep only names that begin so, without it. Default: take off wrappers' prefixes."
        ),
    ] = None,
    best: Annotated[
        bool,
        Option(
            "--best", help="Of a run: the best weights. Default where something tells the best."
        ),
    ] = False,
    last: Annotated[
        bool, Option("--last", help="Of a run: the weights of the last checkpoint.")
    ] = False,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace the target.")] = False,
    model: Annotated[
        str | None, Option(help="For .pt2: package.module:callable that returns the module.")
    ] = None,
    inputs: Annotated[
        list[str] | None,
        Option(
            "--input", help="For .pt2: shape of an input, 1x28x28 or 1x128:int64; once for each."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the weights of a checkpoint under the module's own names."""
    if best and last:
        raise typer.BadParameter("--best and --last are one or the other")
    which: Literal["best", "last"] | None = "best" if best else "last" if last else None
    if target is not None and target.endswith(".pt2"):
        if model is None or not inputs:
            raise typer.BadParameter("a .pt2 target needs --model and --input")
        from flatout.save import export_program_of

        program = export_program_of(
            checkpoint,
            target,
            model,
            inputs,
            which=which,
            key=key,
            prefix=prefix,
            overwrite=overwrite,
        )
        if as_json:
            print_json(program.as_dict())
            return
        typer.echo(printable(f"{program.target}  {program.bytes:,} bytes"))
        typer.echo(printable(f"read back and compared with the model: {program.parity}"))
        typer.echo(printable(f"load it: torch.export.load({program.target!r}).module()"))
        return
    if model is not None or inputs:
        raise typer.BadParameter("--model and --input are for a .pt2 target")
    from flatout.save.export import export as export_weights

    done = export_weights(
        checkpoint, target, which=which, key=key, prefix=prefix, overwrite=overwrite
    )
    if as_json:
        print_json(done.as_dict())
        return
    if done.kept and which is None:
        typer.echo(printable("the run has two; the best is taken (--last for the other):"))
        typer.echo(printable("\n".join(f"  {line}" for line in done.kept)))
    typer.echo(printable(f"read {done.source}"))
    if done.sets:
        typer.echo(printable(f"{done.sets} (--key KEY takes another)"))
    elif done.key:
        typer.echo(printable(f"weights: {done.key}"))
    typer.echo(printable(f"taken off: {' '.join(done.stripped) or 'nothing'}"))
    if done.left_out:
        more = f", … {len(done.left_out) - 5:,} more" if len(done.left_out) > 5 else ""
        typer.echo(printable(f"left out: {', '.join(done.left_out[:5])}{more}"))
    typer.echo(printable(f"{done.target}  {done.tensors:,} tensors, {done.bytes:,} bytes"))
    typer.echo(printable(f"load it: {_loading(done.target)}"))


def _loading(target: str) -> str:
    if target.endswith(".keras"):
        return f"keras.saving.load_model({target!r})"
    if target.endswith(".weights.h5"):
        return f"model.load_weights({target!r})"
    return f"safetensors.torch.load_file({target!r})"
