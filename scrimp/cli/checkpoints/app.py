"""The commands of `scrimp checkpoint`: their options and help. `work.py`, which loads torch, does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(name="checkpoint", rich_markup_mode="rich", pretty_exceptions_enable=False, no_args_is_help=True)

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="A checkpoint, as engine.save writes it.")]


@app.callback()
def checkpoint() -> None:
    """Verify, show, divide and export checkpoints.

    Examples
      scrimp checkpoint verify checkpoints/step-00000100
      scrimp checkpoint export checkpoints/step-00000100 model.safetensors
    """


@app.command()
def verify(folder: Folder) -> None:
    """Compare all checksums, and name each file and tensor that is damaged.

    Exit code 1 if anything is.

    Examples
      scrimp checkpoint verify checkpoints/step-00000100
    """
    from scrimp.cli._console import console
    from scrimp.cli.checkpoints import work

    if not work.verify(console(), folder):
        raise typer.Exit(1)


@app.command()
def inspect(
    folder: Folder,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Show step, ranks, parameters, bytes, format, settings and the extra.

    Examples
      scrimp checkpoint inspect checkpoints/step-00000100
      scrimp checkpoint inspect checkpoints/step-00000100 --json
    """
    from scrimp.cli._console import console
    from scrimp.cli.checkpoints import work

    work.inspect(console(), folder, as_json=as_json)


@app.command()
def reshard(
    folder: Folder,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    ranks: Annotated[int, typer.Option(help="Files of the new checkpoint: one for each rank.", min=1, max=65536)],
) -> None:
    """Write a checkpoint again, divided evenly over another number of files.

    engine.load reads a checkpoint at any number of ranks, so this is only needed
    to move one: as one file, or so that each rank reads no file but its own.

    Examples
      scrimp checkpoint reshard checkpoints/step-00000100 four --ranks 4
    """
    from scrimp.cli.checkpoints import work

    work.reshard(folder, out, ranks)


@app.command()
def export(
    folder: Folder,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A folder, or a file that ends in .safetensors.")],
    dtype: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32. Default: the precision of the run.")] = None,
    max_shard: Annotated[str, typer.Option(help="The most that a file of a folder takes.")] = "5GB",
    files_from: Annotated[
        Path | None, typer.Option(help="A Hugging Face folder, whose config and tokenizer files are copied.")
    ] = None,
) -> None:
    """Write the weights as a Hugging Face folder, or as one safetensors file.

    Trained weights come from their fp32 masters. A folder is one that
    transformers loads; for it, --files-from gives the config and the tokenizer.

    Examples
      scrimp checkpoint export checkpoints/step-00000100 model.safetensors
      scrimp checkpoint export checkpoints/step-00000100 all.safetensors --dtype fp32
    """
    from scrimp.cli.checkpoints import work

    work.export(folder, out, dtype=dtype, max_shard=max_shard, files_from=files_from)
