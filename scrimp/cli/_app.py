r"""The commands, their options and their help texts, and error handling for the terminal.

A command imports what it needs when it runs: `scrimp --help` loads no torch. Help texts are rich markup: a bracket is `\[`.
"""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from scrimp import __version__
from scrimp.cli._console import console
from scrimp.cli._end import UsageError, ending, typed
from scrimp.cli.checkpoints.app import app as checkpoint_app
from scrimp.cli.rules.app import app as rules_app
from scrimp.cli.runs.commands import compare, report
from scrimp.cli.training.commands import TrainCommand, top, train
from scrimp.errors import ScrimpError

MOST = 2**31 - 1  # of rows, tokens, seeds


class Commands(TyperGroup):
    """Turns every error into one message and an exit code: see `_end.py`."""

    def invoke(self, ctx: Any) -> Any:
        with ending():
            return super().invoke(ctx)


app = typer.Typer(
    cls=Commands,
    name="scrimp",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.add_typer(rules_app)
app.add_typer(checkpoint_app)
app.command(cls=TrainCommand)(train)
app.command()(top)
app.command()(report)
app.command()(compare)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"scrimp {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)] = False,
) -> None:
    r"""Train PyTorch models in the least memory a cluster allows.

    Exit codes: 0 done, 1 the work failed or a check is negative, 2 wrong input,
    70 a bug in scrimp, 130 Ctrl-C. With SCRIMP_DEBUG=1 in the environment an
    error shows its traceback.

    Examples
      scrimp demo
      scrimp train examples/gpt.toml
      scrimp plan gpt-tiny --cluster 8xA100-80 --batch 64
      scrimp move --mesh x=2,y=4 --shape 8192,8192 "\[x,y]" "\[y,x]"
    """


@app.command()
def move(
    src: Annotated[str, typer.Argument(metavar="FROM", help=r'The current layout of the array, such as "\[x,y]".')],
    dst: Annotated[str, typer.Argument(metavar="TO", help=r'The target layout, such as "\[y,x]".')],
    mesh: Annotated[str, typer.Option(help="The axes of the mesh and their sizes, such as x=2,y=4.")],
    shape: Annotated[str, typer.Option(help="The size of each dim, such as 8192,8192.")],
    dtype: Annotated[str, typer.Option(help="The dtype of the elements, by its name in torch.")] = "float32",
    collectives_only: Annotated[
        bool, typer.Option("--collectives-only", help="Use collectives only: no direct exchange of parts.")
    ] = False,
    no_peers: Annotated[bool, typer.Option("--no-peers", help="Do not compare with DTensor. Torch is not loaded then.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the program as JSON and nothing else.")] = False,
    latency_us: Annotated[float, typer.Option(help="Latency of a message, in microseconds.")] = 10.0,
    gb_per_s: Annotated[float, typer.Option(help="Bandwidth at which a device receives, in GB/s.")] = 25.0,
) -> None:
    r"""Show how an array moves between layouts: steps, bytes, peak, a picture.

    A layout names, for each dim, the mesh axes that split it, the major axis
    first. "-" marks a dim that is not split. +y after the bracket marks a sum
    over y that is not taken yet. Along axes that are not named, devices hold
    copies.

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

    with typed():
        if not (isfinite(latency_us) and isfinite(gb_per_s)):
            raise ScrimpError(f"a link of {latency_us} us a message and {gb_per_s} GB/s: both must be finite numbers")
        # Divide: 10 / 1e6 is exactly the default link's float, so that programs hash alike.
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
    deep: Annotated[bool, typer.Option("--deep", help="Also exchange an array between two gloo processes.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Report what this machine has: memory, GPUs, torch, backends, packages.

    The exit code is always 0.

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
        str | None, typer.Option(help="cpu, cuda, or one GPU, such as cuda:1. Default: the device that the engine uses.")
    ] = None,
    disk: Annotated[Path | None, typer.Option(help="Also measure the disk of this folder.")] = None,
    operators: Annotated[bool, typer.Option("--operators", help="Also measure operators, by class and size.")] = False,
    cluster: Annotated[
        str | None, typer.Option(help="A cluster of such devices, by name or file: --json writes it with what was measured.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the cluster to this file, as JSON.")] = None,
) -> None:
    """Measure this machine: compute, copies, and the update on the host.

    It takes twenty seconds with a GPU, one without. On a GPU it also measures
    what a plan does not count: CUDA context, workspace of kernels, allocator.

    engine.bound() compares a step with these figures. In Python,
    scrimp.Cluster.probe() returns them, and scrimp.Cluster.from_json reads the
    file.

    With --operators it also measures matrix products, attention, norms and so
    on, at several sizes, in fp32 and bf16: some twenty seconds. It says how far
    its predictions for other shapes are off. A plan for a cluster file with
    these rates predicts seconds by them.

    Examples
      scrimp probe
      scrimp probe --disk . --json machine.json
      scrimp probe --operators --cluster 8xA100-80 --json measured.json
      scrimp plan gpt-tiny --batch 64 --cluster measured.json --reserve auto
    """
    from scrimp.cli import _probe

    _probe.show(console(), device=device, disk=disk, operators=operators, cluster=cluster, json_file=json_file)


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="A model of the zoo, a folder with a config.json, or module:function.")],
    cluster: Annotated[
        str, typer.Option(help="A preset, such as 8xH100 (see scrimp clusters), or a file, such as cluster.toml.")
    ],
    mesh: Annotated[str | None, typer.Option(help="Axes and their sizes, such as dp=4,tp=8. Default: searched.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory budget of one device, such as 40GiB. Default: all of it.")] = None,
    reserve: Annotated[str | None, typer.Option(help="Of it kept free beside the plan: auto, or a size. Default: none.")] = None,
    batch: Annotated[
        int | None, typer.Option(help="Sequences or images in a step, over all devices. Default: 32.", min=1, max=MOST)
    ] = None,
    seq: Annotated[
        int | None, typer.Option(help="Tokens of a sequence, for a config.json. Default: 2048.", min=1, max=MOST)
    ] = None,
    objective: Annotated[str, typer.Option(help="What to minimise: memory, time or redundancy.")] = "memory",
    optimizer: Annotated[str, typer.Option(help="adamw or sgd.")] = "adamw",
    precision: Annotated[str, typer.Option(help="bf16, fp32, or megatron-bf16 (18 bytes a parameter).")] = "bf16",
    keep: Annotated[bool, typer.Option("--keep", help="Keep all activations: no recomputation, no offload.")] = False,
    stages: Annotated[str, typer.Option(help="Pipeline stages: a number, or auto.")] = "1",
    micro_batches: Annotated[str, typer.Option(help="Micro-batches, with gradient accumulation: a number, or auto.")] = "1",
    interleave: Annotated[int, typer.Option(help="Model chunks on each stage (interleaved 1F1B).", min=1)] = 1,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A setting of the model, such as layers=32. May be repeated.")
    ] = None,
    time_limit: Annotated[float, typer.Option(help="Time limit of the search, in seconds.", min=1)] = 60.0,
    gap: Annotated[float, typer.Option(help="Optimality gap at which the search stops.", min=0, max=0.99)] = 0.01,
    out: Annotated[Path | None, typer.Option("--out", help="Also write the plan to this file, as JSON.")] = None,
    report: Annotated[
        Path | None, typer.Option(help="Also write a report to this HTML file, with prices of alternatives and the Pareto front.")
    ] = None,
    baselines: Annotated[
        bool, typer.Option("--baselines", help="Compare with known parallelisms (DDP, ZeRO, tensor parallelism).")
    ] = False,
    explain: Annotated[
        list[str] | None,
        typer.Option("--explain", metavar="NAME", help="Explain the choice for a weight, module or layer. May be repeated."),
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            "--what-if", metavar="CHANGE", help="Plan again after a change: +2GiB, 24GiB, '-1 node', 16xH100. May be repeated."
        ),
    ] = None,
    budget: Annotated[str | None, typer.Option(hidden=True)] = None,
    seconds: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Choose how to shard every operator for the least memory, then time.

    No GPU is needed, and no weight is allocated: a laptop can plan a model of
    175 billion parameters. Exit code 1 if no plan fits.

    Examples
      scrimp plan gpt-tiny --cluster 8xA100-80 --batch 64
      scrimp plan gpt-tiny --set layers=4 --cluster 8xA100-80 --mesh dp=2,tp=4
      scrimp plan gpt-tiny --cluster 8xA100-80 --stages 2 --micro-batches 4
      scrimp plan llama-tiny --cluster 2x24GiB --objective time --out plan.json
      scrimp plan gpt-tiny --cluster 4xCPU --mesh x=4 --explain blocks.0.mlp.up
      scrimp plan gpt-tiny --cluster 16xA100-80 --mesh x=16 --what-if "-1 node"
      scrimp plan gpt-6b7 --cluster 32xA100-80 --batch 64 --baselines
    """
    from scrimp.cli import _plan_check

    with typed():
        _plan_check.refuse_old(budget=(budget, "--memory"), seconds=(seconds, "--time-limit"))
        _plan_check.check(
            model=model, cluster=cluster, mesh=mesh, memory=memory, batch=batch, seq=seq, objective=objective,
            optimizer=optimizer, precision=precision, stages=stages, micro_batches=micro_batches, interleave=interleave,
            settings=settings or [], time_limit=time_limit, gap=gap, out=out, explain=explain or [], what_if=what_if or [],
            report=report, reserve=reserve,
        )  # fmt: skip
    from scrimp.cli import _plan  # loads torch

    _plan.make(
        console(), model=model, cluster=cluster, mesh=mesh, memory=memory, batch=batch or _plan_check.BATCH,
        seq=seq or _plan_check.SEQ, objective=objective, optimizer=optimizer, precision=precision, keep=keep, stages=stages,
        micro_batches=micro_batches, interleave=interleave, settings=settings or [], time_limit=time_limit, gap=gap, out=out,
        baselines=baselines, explain=explain or [], what_if=what_if or [], report=report, reserve=reserve,
    )  # fmt: skip


@app.command()
def rehearse(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN.json", help="A plan, as scrimp plan --out writes it.")],
    rank: Annotated[str, typer.Option(help="The rank, or all: one of each class of ranks with the same sizes.")] = "0",
    on: Annotated[
        str, typer.Option(help="meta (no memory, any size), cpu or cuda (for real, with random data; compute is timed).")
    ] = "meta",
    model: Annotated[str | None, typer.Option(help="The model. Default: the one that the plan names.")] = None,
    batch: Annotated[
        int | None, typer.Option(help="Sequences or images in a step. Default: as planned.", min=1, max=MOST)
    ] = None,
    seq: Annotated[
        int | None, typer.Option(help="Tokens of a sequence, for a config.json. Default: as planned.", min=1, max=MOST)
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A setting of the model, such as layers=32. May be repeated.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Also write the rehearsal to this file, as JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Run a rank of a plan here, without the others: memory over time, seconds.

    The rank runs its real program. There are no other ranks: what they would
    send has the right sizes, and no meaning. On meta no memory is needed and no
    GPU: a laptop can rehearse a rank of 1,024. Communication is predicted from
    the plan's cluster.

    Examples
      scrimp plan gpt-tiny --cluster 8xA100-80 --mesh dp=2,tp=4 --out plan.json
      scrimp rehearse plan.json
      scrimp rehearse plan.json --rank all
      scrimp rehearse plan.json --rank 3 --on cpu
      scrimp rehearse plan.json --json
    """
    from scrimp.cli._files import check_writable, load_plan

    with typed():
        if on not in ("meta", "cpu", "cuda"):
            raise ScrimpError(f"--on {on}: it is meta, cpu or cuda")
        check_writable("--out", out)
        plan = load_plan(plan_file)
    from scrimp.cli import _rehearse  # loads torch

    _rehearse.run(
        console(), plan, plan_file, rank=rank, on=on, model=model, batch=batch, seq=seq, settings=settings or [], as_json=as_json,
        out=out,
    )  # fmt: skip


@app.command()
def diff(
    one: Annotated[Path, typer.Argument(metavar="A.json", help="A plan, as scrimp plan --out writes it.")],
    other: Annotated[Path, typer.Argument(metavar="B.json", help="Another plan.")],
) -> None:
    """Compare two plans: memory, time, and the choices for each layer.

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
        str | None,
        typer.Argument(
            metavar="NAME|FILE", help="A preset, such as 16xH100, or a file, such as cluster.toml. Default: list the kinds."
        ),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the cluster to this file, as JSON.")] = None,
) -> None:
    """List the kinds of devices that scrimp knows, or show one cluster.

    A cluster is shown with its devices, links and meshes. The figures are those
    that vendors publish. docs/explanation/cluster.md describes files with other
    figures. No GPU is needed.

    Examples
      scrimp clusters
      scrimp clusters 16xH100
      scrimp clusters 2x24GiB --json cluster.json
    """
    from scrimp.cli import _clusters

    _clusters.show(console(), name=name, json_file=json_file)


@app.command()
def demo(
    steps: Annotated[
        int | None, typer.Option(help="Steps of the training run, 10 or more. Default: 80.", min=10, max=100_000)
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the text and of the initial weights. Default: 0.", min=0, max=MOST)
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only the closing table.")] = False,
    moves: Annotated[
        bool, typer.Option("--moves", help="Instead, move arrays between layouts on 8 processes, compared with DTensor.")
    ] = False,
) -> None:
    """Train a small GPT in a third of plain PyTorch's memory, kill it, resume it.

    It takes about a minute. Two processes train within a budget on CPU memory;
    no GPU is needed. They are killed, and one process resumes from the
    checkpoint with a smaller budget. Exit code 1 if the peak was above the
    budget, or if a loss after the resume differs from the one before.

    Examples
      scrimp demo
      scrimp demo --steps 20 --seed 7
      scrimp demo --quiet
      scrimp demo --moves
    """
    if moves:
        for name, given in (("--steps", steps), ("--seed", seed), ("--quiet", quiet or None)):
            if given is not None:
                raise UsageError(f"{name} has no effect with --moves: leave out one of them")
        from scrimp.cli.demo.moves import moves as tour_of_moves

        tour_of_moves(console())
        return
    from scrimp.cli.demo import tour

    if tour.demo(console(), steps=steps or tour.FULL.steps, seed=seed or 0, quiet=quiet):
        raise typer.Exit(1)
