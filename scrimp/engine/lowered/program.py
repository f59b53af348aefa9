"""Whether a plan can run in this engine, and its program."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from scrimp.chunks import DEVICE, ChunkTable, Optimizer, Tier, Wire
from scrimp.engine.lowered.graph import graph_of
from scrimp.engine.setup.adopt import DEFAULT_CHUNK
from scrimp.engine.setup.budget import Budget
from scrimp.engine.setup.initial_placement import Fit
from scrimp.engine.setup.validate import OPTIMIZERS
from scrimp.errors import RunError
from scrimp.lower import Lowered, Ranks, digest, lower
from scrimp.planner import Plan


@dataclass(frozen=True, kw_only=True)
class Program:
    """A plan, and its steps for the captured model."""

    plan: Plan
    lowered: Lowered

    @property
    def micro_batches(self) -> int:
        return micro_batches_of(self.plan)


def program_of(plan: Plan, model: nn.Module, wire: Wire, optimizer: Optimizer, precision: str) -> Program:
    """Raises `RunError` with the first difference if the plan is of another model, batch, optimizer, precision or rank count."""
    if plan.schedule is not None and len(plan.schedule.stages) > 1:
        raise RunError(f"the plan has {len(plan.schedule.stages)} pipeline stages: the engine runs plans without stages")
    if plan.mesh.size != wire.world:
        raise RunError(
            f"the plan is for {plan.mesh.size} ranks ({plan.mesh}), and {wire.world} are here: start as many with torchrun, or "
            "plan for this number"
        )
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
    lowered = lower(plan, graph_of(plan, model, wire))
    if wire.world > 1:
        Ranks(plan.mesh, wire.rank, wire.group).agree(digest(lowered), wire.device)
    return Program(plan=plan, lowered=lowered)


def check_arguments(plan: Plan, *, activations: object, mesh: object, loss: object, chunk_numel: int) -> None:
    """Raises if a setting is given that the plan decides."""
    if activations != "auto":
        raise RunError(f"activations={activations!r}: under a plan each operator's activations are kept as the plan says")
    if mesh is not None and str(mesh) != str(plan.mesh):
        raise RunError(f"mesh={str(mesh)!r}, and the plan's is '{plan.mesh}': leave it out")
    if loss is not None:
        raise RunError("loss=...: a plan has the operators up to the loss that the model returns; plan a model that returns it")
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
    if program.plan.memory.peak_nbytes + more_nbytes <= budget.plan_nbytes:
        return [DEVICE] * len(table.layers)
    return fit.places()
