"""The work of `scrimp checkpoint`."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from scrimp.checkpoint import Checkpoint
from scrimp.checkpoint import reshard as write_resharded
from scrimp.cli._end import UsageError, typed
from scrimp.cli.render.table import print_table
from scrimp.errors import CheckpointError
from scrimp.ledger import format_nbytes

if TYPE_CHECKING:
    from rich.console import Console

LONGEST = 300  # characters of the extra that are shown


def opened(folder: Path) -> Checkpoint:
    with typed():
        if not folder.exists() and not folder.with_name(folder.name + ".previous").exists():
            raise UsageError(f"{folder}: there is no such folder")
    return Checkpoint(folder)


def verify(console: Console, folder: Path) -> bool:
    checkpoint = opened(folder)
    found = list(checkpoint.faults())
    for fault in found:
        console.print(fault, soft_wrap=True)
    if not found:
        _ = checkpoint.headers  # the manifest and the files agree
        nbytes = sum((checkpoint.folder / row.name).stat().st_size for row in checkpoint.manifest.files)
        console.print(
            f"{checkpoint.folder}: {_files(len(checkpoint.manifest.files))}, {format_nbytes(nbytes)}: complete, undamaged"
        )
    return not found


def inspect(console: Console, folder: Path, *, as_json: bool) -> None:
    checkpoint = opened(folder)
    data = described(checkpoint)
    if as_json:
        typer.echo(json.dumps(data))
        return
    extra = json.dumps(data["extra"])
    rows = [
        ("folder", str(checkpoint.folder)),
        ("format", str(data["format"])),
        ("step", f"{data['step']} ({data['skipped']} skipped)"),
        ("written by", f"{data['ranks']} ranks" + (", under a plan" if data["planned"] else "")),
        ("parameters", f"{data['parameters']:,} in {data['tensors']} tensors, {data['trained']:,} of them trained"),
        ("bytes", format_nbytes(data["nbytes"])),
        ("precision", data["precision"]),
        ("optimizer", f"{data['optimizer']}, {data['states']} states in {data['state']}"),
        ("groups", "; ".join(f"lr {group.get('lr')}" for group in data["groups"]) or "none"),
        ("extra", extra if len(extra) <= LONGEST else f"{extra[:LONGEST]}... ({len(extra)} characters)"),
    ]
    print_table(console, ("", "checkpoint"), rows, pieces="")


def described(checkpoint: Checkpoint) -> dict[str, Any]:
    manifest = checkpoint.manifest
    sizes = [(prod(entry.shape), entry.trainable) for entry in manifest.entries.values()]
    return {
        "format": f"scrimp.checkpoint version {manifest.version}",
        "step": manifest.steps,
        "skipped": manifest.skipped,
        "ranks": len(manifest.files),
        "planned": any(each.box is not None for entry in manifest.entries.values() for each in entry.extents),
        "parameters": sum(numel for numel, _ in sizes),
        "trained": sum(numel for numel, trained in sizes if trained),
        "tensors": len(sizes),
        "nbytes": sum(_size(checkpoint.folder / row.name) for row in manifest.files),
        "precision": manifest.precision,
        "optimizer": manifest.optimizer,
        "states": manifest.states,
        "state": manifest.state,
        "groups": list(manifest.groups),
        "extra": manifest.extra,
    }


def _size(path: Path) -> int:
    if not path.exists():
        raise CheckpointError(f"{path} is missing")
    return path.stat().st_size


def reshard(folder: Path, out: Path, ranks: int) -> None:
    checkpoint = opened(folder)
    for lost in write_resharded(checkpoint.folder, out, ranks):
        typer.echo(f"left out: {lost}")
    typer.echo(f"written to {out}: {ranks} file{'' if ranks == 1 else 's'}")


def export(folder: Path, out: Path, *, dtype: str | None, max_shard: str, files_from: Path | None) -> None:
    checkpoint = opened(folder)
    from scrimp.ext.hf.exports import check_export
    from scrimp.ext.hf.exports import export as write_exported

    with typed():
        check_export(checkpoint, out, dtype, max_shard, files_from)
    for name in write_exported(checkpoint.folder, out, dtype=dtype, max_shard=max_shard, files_from=files_from):
        typer.echo(f"written: {out if out.suffix == '.safetensors' else out / name}")


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count} files"
