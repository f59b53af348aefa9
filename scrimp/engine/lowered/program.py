"""Whether a plan can run in this engine, and its program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from scrimp.capture import Graph
from scrimp.chunks import DEVICE, ChunkTable, Optimizer, Tier, Wire
from scrimp.engine.lowered.graph import graph_of
from scrimp.engine.setup.adopt import DEFAULT_CHUNK
from scrimp.engine.setup.budget import Budget
from scrimp.engine.setup.initial_placement import Fit
from scrimp.engine.setup.validate import OPTIMIZERS
from scrimp.errors import RunError
from scrimp.layout import Mesh
from scrimp.lower import Lowered, LoweredLayer, Ranks, Rest, Staged, digest, lower, lower_stages
from scrimp.planner import Plan


@dataclass(frozen=True, kw_only=True)
class Part:
    """What the ranks of a stage run: its pieces of the model, in order. Without stages that is the whole model, as one piece.
    `layers`: by their numbers in the model. `partials`: as in `Lowered`, of all pieces."""

    pieces: tuple[Lowered, ...]

    @property
    def rest(self) -> Mapping[str, Rest]:
        """Of the parameters that the stage holds."""
        return self.pieces[0].rest

    @cached_property
    def layers(self) -> Mapping[int, LoweredLayer]:
        return {each.first + k: layer for each in self.pieces for k, layer in enumerate(each.layers)}

    @cached_property
    def partials(self) -> Mapping[str, tuple[tuple[str, ...] | None, ...]]:
        found: dict[str, tuple[tuple[str, ...] | None, ...]] = {}
        for each in self.pieces:
            for name, axes in each.partials.items():
                found[name] = (*found.get(name, ()), *axes)
        return found


@dataclass(frozen=True, kw_only=True)
class Program:
    """A plan, and its steps for the captured model. `parts`: of each stage. This rank is `rank` of the mesh of its stage.
    `staged`: what crosses the borders between stages, and the order of their turns; None without stages."""

    plan: Plan
    parts: tuple[Part, ...]
    stage: int
    rank: int
    staged: Staged | None = None

    @property
    def part(self) -> Part:
        """Of this rank's stage."""
        return self.parts[self.stage]

    @property
    def digest(self) -> str:
        """Equal on two ranks exactly when they run the same steps."""
        return digest(self.part.pieces[0]) if self.staged is None else self.staged.digest()

    @property
    def micro_batches(self) -> int:
        return micro_batches_of(self.plan)

    @property
    def peak_nbytes(self) -> int:
        """What the plan predicts for a rank of this stage."""
        schedule = self.plan.schedule
        return (self.plan if schedule is None else schedule.stages[self.stage]).memory.peak_nbytes

    @cached_property
    def layers(self) -> tuple[LoweredLayer, ...]:
        """Of the whole model, in order."""
        every = {number: layer for part in self.parts for number, layer in part.layers.items()}
        return tuple(every[number] for number in sorted(every))

    @cached_property
    def holders(self) -> Mapping[str, int]:
        """Of each parameter the first stage that holds it."""
        return {name: s for s, part in reversed([*enumerate(self.parts)]) for name in part.rest}

    def rest(self, name: str) -> Rest:
        """On the first stage that holds it."""
        return self.parts[self.holders[name]].rest[name]


def program_of(plan: Plan, model: nn.Module, wire: Wire, optimizer: Optimizer, precision: str, device: torch.device) -> Program:
    """Raises `RunError` with the first difference if the plan is of another model, batch, optimizer, precision or rank count."""
    _check_ranks(plan, wire, device)
    check_settings(plan, optimizer, precision)
    program = lowered_program(plan, graph_of(plan, model, wire), wire.rank)
    if wire.world > 1:
        Ranks(Mesh({"rank": wire.world}), wire.rank, wire.group).agree(program.digest, wire.device)
    return program


def check_settings(plan: Plan, optimizer: Optimizer, precision: str) -> None:
    """Raises `RunError` if the plan was made for other settings."""
    if plan.precision != precision and not plan.precision.startswith("megatron"):
        raise RunError(
            f"the plan is for precision={plan.precision!r}, and the engine's is {precision!r}: give Engine(precision="
            f"{plan.precision!r}), or plan with precision={precision!r}"
        )
    if not isinstance(optimizer, OPTIMIZERS[plan.optimizer]):
        raise RunError(
            f"the plan is for optimizer={plan.optimizer!r}, and the engine's is {type(optimizer).__name__}: they have other "
            "states; plan with the engine's optimizer"
        )
    if optimizer.state != "fp32":
        raise RunError(f"AdamW(state={optimizer.state!r}) under a plan is not possible: plans are made for fp32 states")


def lowered_program(plan: Plan, graph: Graph, rank: int) -> Program:
    """`rank`: among the ranks of all stages."""
    if stages_of(plan) == 1:
        return Program(plan=plan, parts=(Part(pieces=(lower(plan, graph),)),), stage=0, rank=rank)
    staged = lower_stages(plan, graph)
    parts = [tuple(each.lowered for each in staged.pieces[s :: staged.stages]) for s in range(staged.stages)]
    stage, inside = divmod(rank, plan.mesh.size)
    return Program(plan=plan, parts=tuple(Part(pieces=each) for each in parts), stage=stage, rank=inside, staged=staged)


def stages_of(plan: Plan | None) -> int:
    return 1 if plan is None or plan.schedule is None else len(plan.schedule.stages)


def _check_ranks(plan: Plan, wire: Wire, device: torch.device) -> None:
    stages = stages_of(plan)
    if stages * plan.mesh.size != wire.world:
        each = f"{stages} stages of {plan.mesh.size} ranks, {plan.mesh}" if stages > 1 else f"{plan.mesh}"
        raise RunError(
            f"the plan is for {stages * plan.mesh.size} ranks ({each}), and {wire.world} are here: start as many with torchrun, "
            "or plan for this number"
        )
    if stages > 1 and device.type != wire.device.type:
        raise RunError(
            f"the plan has {stages} pipeline stages, the device is {device}, and the process group is gloo's, over which stages "
            "exchange tensors of the CPU alone: start the ranks with init_process_group('nccl'), or give Engine(device='cpu')"
        )


def check_arguments(plan: Plan, *, activations: object, mesh: object, loss: object, chunk_numel: int, reduction: str) -> None:
    """Raises if a setting is given that the plan decides."""
    if activations != "auto":
        raise RunError(f"activations={activations!r}: under a plan each operator's activations are kept as the plan says")
    if mesh is not None and str(mesh) != str(plan.mesh):
        raise RunError(f"mesh={str(mesh)!r}, and the plan's is '{plan.mesh}': leave it out")
    if loss is not None:
        raise RunError("loss=...: a plan has the operators up to the loss that the model returns; plan a model that returns it")
    if reduction != "mean":
        raise RunError(f"reduction={reduction!r}: a plan computes the mean loss of the global batch")
    if chunk_numel != DEFAULT_CHUNK:
        raise RunError(f"chunk_numel={chunk_numel}: under a plan model data is sharded as the plan says, not in chunks")


def micro_batches_of(plan: Plan, given: int = 1) -> int:
    """The plan's micro-batches. Raises if another number than 1, the default, is given and differs."""
    planned = plan.schedule.micro_batches if plan.schedule is not None else 1
    if given not in (1, planned):
        raise RunError(f"micro_batches={given}, and the plan has {planned}: leave it out, or plan with as many")
    return planned


def places_of(program: Program, budget: Budget, fit: Fit, table: ChunkTable, more_nbytes: int) -> list[Tier]:
    """All on the device if the plan fits there, with what comes on top of it; else as without a plan."""
    if program.peak_nbytes + more_nbytes <= budget.plan_nbytes:
        return [DEVICE] * len(table.layers)
    return fit.places()
