r"""The commands: their options and help, and how an error reaches the person who typed.

Each command imports what it needs when it runs, so that `scrimp --help` loads neither torch nor numpy. Help texts are
rich markup, in which an opening bracket is written `\[`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from scrimp import __version__
from scrimp.cli import _rules_app
from scrimp.errors import ScrimpError

COLUMNS = 100  # where no terminal says otherwise


class Commands(TyperGroup):
    """Every error that scrimp raises on purpose ends as one line and exit code 2, never as a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ScrimpError as error:
            console(stderr=True).print(f"error: {error}", style="red", soft_wrap=True)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=Commands,
    name="scrimp",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.add_typer(_rules_app.app)


def console(*, stderr: bool = False) -> Any:
    """A rich console on which brackets are text: layouts would else be taken for markup."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")  # a box that cannot be drawn is no reason to fail
    known = stream.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Console(stderr=stderr, markup=False, highlight=False, emoji=False, width=None if known else COLUMNS)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"scrimp {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)] = False,
) -> None:
    r"""Train PyTorch models in the least memory a cluster allows.

    Begin with
      scrimp demo
      scrimp move --mesh x=2,y=4 --shape 8192,8192 "\[x,y]" "\[y,x]"
    """


@app.command()
def move(
    src: Annotated[str, typer.Argument(metavar="FROM", help=r'The layout the array has, such as "\[x,y]".')],
    dst: Annotated[str, typer.Argument(metavar="TO", help=r'The layout it shall have, such as "\[y,x]".')],
    mesh: Annotated[str, typer.Option(help="The axes of the mesh and their sizes, such as x=2,y=4.")],
    shape: Annotated[str, typer.Option(help="The size of each dim, such as 8192,8192.")],
    dtype: Annotated[str, typer.Option(help="The type of the elements, by its name in torch.")] = "float32",
    collectives_only: Annotated[
        bool, typer.Option("--collectives-only", help="Leave out the direct exchange of arbitrary parts.")
    ] = False,
    no_peers: Annotated[bool, typer.Option("--no-peers", help="Do not compare with DTensor; torch is not loaded then.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the program as JSON and nothing else.")] = False,
    latency_us: Annotated[float, typer.Option(help="Microseconds a message takes.")] = 10.0,
    gb_per_s: Annotated[float, typer.Option(help="Gigabytes a device receives in a second.")] = 25.0,
) -> None:
    r"""Show how an array moves from one layout to another: the steps, bytes, peak, and a picture.

    A layout names, for each dim, the mesh axes that split it, the major one
    first. "-" is a dim that is whole; +y after the bracket is a sum over y that
    is not taken yet. Axes that are not named hold copies.

    Examples
      scrimp move --mesh x=2,y=4 --shape 8192,8192 "\[x,y]" "\[y,x]"
      scrimp move --mesh x=2,y=4 --shape 64,64 "\[x*y,-]" "\[y*x,-]" --no-peers
      scrimp move --mesh x=2,y=4 --shape 64,64 "\[-,-]+x" "\[y,x]" --dtype bfloat16
      scrimp move --mesh x=8 --shape 1000 "\[x]" "\[-]" --json
    """
    from scrimp.cli._move import parse_shape, show
    from scrimp.cluster import Cluster, Link
    from scrimp.layout import Mesh
    from scrimp.move import synthesize

    if latency_us != latency_us or gb_per_s != gb_per_s:
        raise ScrimpError(f"a link of {latency_us} us a message and {gb_per_s} GB/s: both must be numbers")
    # Divided, not multiplied: 10 / 1e6 is the very float that the default link has, so that programs hash alike.
    cluster = Cluster(default=Link(latency_seconds=latency_us / 1e6, bytes_per_second=gb_per_s * 1e9))
    program = synthesize(
        parse_shape(shape), Mesh.parse(mesh), src, dst, dtype=dtype, cluster=cluster, direct=not collectives_only
    )
    if as_json:
        typer.echo(program.to_json())
    else:
        show(console(), program, cluster, peers=not no_peers)


@app.command()
def doctor(
    deep: Annotated[bool, typer.Option("--deep", help="Also let two gloo processes exchange an array.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Say what this machine has: memory, GPUs, torch, backends, packages. It always ends with exit code 0.

    Examples
      scrimp doctor
      scrimp doctor --deep --json
    """
    from scrimp.cli import _doctor

    rows = _doctor.examine(deep=deep)
    if as_json:
        typer.echo(_doctor.to_json(rows))
    else:
        _doctor.show(console(), rows)


@app.command()
def probe(
    device: Annotated[
        str | None, typer.Option(help="Such as cuda:1 or cpu; without it the one that an engine would take.")
    ] = None,
    disk: Annotated[Path | None, typer.Option(help="A folder whose disk is measured too.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the cluster to this file, as JSON.")] = None,
) -> None:
    """Measure this machine: compute, copies one way and both, the host's update. Three seconds with a GPU, one without.

    These are the figures that engine.bound() holds a step against; scrimp.Cluster.probe()
    returns them in Python, and scrimp.Cluster.from_json reads the file.

    Examples
      scrimp probe
      scrimp probe --disk /data --json machine.json
    """
    from scrimp.cli import _probe

    _probe.show(console(), device=device, disk=disk, json_file=json_file)


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="A model of the zoo, a folder with a config.json, or module:function.")],
    cluster: Annotated[str, typer.Option(help="Such as 8xH100 (see scrimp clusters), or a cluster.toml.")],
    mesh: Annotated[str | None, typer.Option(help="Axes and sizes, such as dp=4,tp=8; searched if not given.")] = None,
    budget: Annotated[str | None, typer.Option(help="Of a device, such as 40GiB; all it has if not given.")] = None,
    batch: Annotated[int, typer.Option(help="Sequences or images in a step, of all devices together.", min=1)] = 32,
    seq: Annotated[int, typer.Option(help="Tokens of a sequence, for a config.json; the zoo has its own.", min=1)] = 2048,
    objective: Annotated[str, typer.Option(help="memory, time or redundancy: what is to be least.")] = "memory",
    optimizer: Annotated[str, typer.Option(help="adamw or sgd.")] = "adamw",
    precision: Annotated[str, typer.Option(help="bf16, fp32, or megatron-bf16, which counts 18 bytes a parameter.")] = "bf16",
    keep: Annotated[bool, typer.Option("--keep", help="Keep all activations: recompute nothing, offload nothing.")] = False,
    stages: Annotated[str, typer.Option(help="Pipeline stages: a number, or auto.")] = "1",
    micro_batches: Annotated[str, typer.Option(help="Equal parts of the batch, one after the other: a number, or auto.")] = "1",
    interleave: Annotated[int, typer.Option(help="Pieces of the model a stage.", min=1)] = 1,
    settings: Annotated[list[str] | None, typer.Option("--set", help="A setting of the model, such as layers=32.")] = None,
    seconds: Annotated[float, typer.Option(help="For the search, at most.", min=1)] = 60.0,
    gap: Annotated[float, typer.Option(help="Good enough: so much above the best at most.", min=0, max=0.99)] = 0.01,
    out: Annotated[Path | None, typer.Option("--out", help="Write the plan to this file, as JSON.")] = None,
    baselines: Annotated[bool, typer.Option("--baselines", help="Show known parallelisms beside the plan.")] = False,
    explain: Annotated[
        list[str] | None,
        typer.Option("--explain", metavar="NAME", help="Of a weight, module or layer: why it is as it is. More than once."),
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option("--what-if", metavar="CHANGE", help="Such as +2GiB, 24GiB, '-1 node', 16xH100. More than once."),
    ] = None,
) -> None:
    """Choose the sharding of every operator that takes the least memory, then the least time. No GPU is needed.

    The model is only looked at, never built: 175 billion parameters plan on a laptop.

    Examples
      scrimp plan gpt-tiny --cluster 8xA100-80 --batch 64
      scrimp plan gpt-tiny --set layers=32 --set dim=4096 --set heads=32 --cluster 32xA100-80 --mesh dp=4,tp=8
      scrimp plan gpt-6b7 --cluster 32xA100-80 --batch 64 --stages 4 --micro-batches 8 --interleave 2
      scrimp plan llama-tiny --cluster 2x24GiB --objective time --budget 20GiB --out plan.json
      scrimp plan gpt-tiny --cluster 4xCPU --mesh x=4 --explain blocks.0.mlp.up.weight
      scrimp plan gpt-tiny --cluster 16xA100-80 --batch 64 --what-if "+10MiB" --what-if "-1 node"
    """
    from scrimp.cli import _plan

    _plan.make(
        console(), model=model, cluster=cluster, mesh=mesh, budget=budget, batch=batch, seq=seq, objective=objective,
        optimizer=optimizer, precision=precision, keep=keep, stages=stages, micro_batches=micro_batches, interleave=interleave,
        settings=settings or [], seconds=seconds, gap=gap, out=out, baselines=baselines, explain=explain or [],
        what_if=what_if or [],
    )  # fmt: skip


@app.command()
def diff(
    one: Annotated[Path, typer.Argument(metavar="A.json", help="A plan, as scrimp plan --out writes it.")],
    other: Annotated[Path, typer.Argument(metavar="B.json", help="Another one.")],
) -> None:
    """Compare two plans: what they take, and layer by layer what they chose.

    Examples
      scrimp plan gpt-tiny --cluster 8xA100-80 --mesh x=8 --out A.json
      scrimp plan gpt-tiny --cluster 8xA100-80 --mesh x=2,y=4 --out B.json
      scrimp diff A.json B.json
    """
    from scrimp.cli import _diff

    _diff.compare(console(), one, other)


@app.command()
def clusters(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME or FILE]", help="Such as 16xH100, or a cluster.toml; without it all kinds.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the cluster to this file, as JSON.")] = None,
) -> None:
    """List the kinds of devices that plans can be made for; or show one cluster, its links and its meshes. No GPU is needed.

    Figures are the makers' own; docs/clusters.md says how to write a file with others.

    Examples
      scrimp clusters
      scrimp clusters 16xH100
      scrimp clusters cluster.toml --json cluster.json
    """
    from scrimp.cli import _clusters

    _clusters.show(console(), name=name, json_file=json_file)


@app.command()
def demo(
    steps: Annotated[int, typer.Option(help="Steps of the training run, 10 or more.", min=10)] = 80,
    seed: Annotated[int, typer.Option(help="Chooses the grammar of the text and the first weights.")] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the closing table and nothing else.")] = False,
    moves: Annotated[
        bool, typer.Option("--moves", help="Instead: move arrays between layouts on 8 processes, beside DTensor.")
    ] = False,
) -> None:
    """Train a small GPT within a third of the memory that plain PyTorch takes; kill it; resume it. About a minute.

    Two processes of this machine train within a device budget (kept on CPU memory,
    no GPU is needed), are killed, and the run goes on from its checkpoint on one
    process with a smaller budget. Exit code 1 if the budget was not kept or a loss
    after the resume is not the one before.

    Examples
      scrimp demo
      scrimp demo --steps 20 --seed 7
      scrimp demo --quiet
      scrimp demo --moves
    """
    if moves:
        from scrimp.cli._demo_moves import moves as tour_of_moves

        tour_of_moves(console())
        return
    from scrimp.cli import _demo

    if _demo.demo(console(), steps=steps, seed=seed, quiet=quiet):
        raise typer.Exit(1)
