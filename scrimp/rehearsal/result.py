"""What a rehearsal finds: memory over the points of a step by kind, the peak with what is alive there, and seconds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from scrimp.errors import ScrimpError, check_format
from scrimp.ledger import format_nbytes
from scrimp.rehearsal.clock import ComputeTime

FORMAT, VERSION = "scrimp.rehearsal", 2
SHOWN = 8  # tensors in the summary


@dataclass(frozen=True, kw_only=True)
class AliveTensor:
    """A tensor that is alive at the peak. `made_at`: the point in which it was made."""

    nbytes: int
    kind: str
    shape: tuple[int, ...]
    dtype: str
    made_at: str


@dataclass(frozen=True, kw_only=True)
class RehearsedPeak:
    """`point`: the number of the point with the most bytes, `where`: its name. `alive`: the tensors besides model data, batch and
    what the operation itself takes, the largest first."""

    nbytes: int
    point: int
    where: str
    kinds: Mapping[str, int]
    alive: tuple[AliveTensor, ...]


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """What the process takes of a GPU in the timed steps: peaks of the rank's storages (`live_nbytes`, which a plan predicts), of
    what tensors and kernels request from the allocator, of its blocks, and of what it reserves. `outside_nbytes`: used on the
    device besides: the context, loaded kernels, and other processes. Each peak is at a time of its own."""

    live_nbytes: int
    requested_nbytes: int
    allocated_nbytes: int
    reserved_nbytes: int
    outside_nbytes: int

    @property
    def workspace_nbytes(self) -> int:
        """What kernels request besides the storages."""
        return max(0, self.requested_nbytes - self.live_nbytes)

    @property
    def rounding_nbytes(self) -> int:
        return self.allocated_nbytes - self.requested_nbytes

    @property
    def fragmentation_nbytes(self) -> int:
        return self.reserved_nbytes - self.allocated_nbytes

    @property
    def shares(self) -> tuple[float, float]:
        """Rounding and fragmentation relative to the live bytes, for `Reserve.rehearsed`."""
        return self.rounding_nbytes / max(self.live_nbytes, 1), self.fragmentation_nbytes / max(self.live_nbytes, 1)

    def line(self) -> str:
        """As text."""
        parts = (
            ("of storages", self.live_nbytes), ("of workspace", self.workspace_nbytes), ("of rounding", self.rounding_nbytes),
            ("of fragmentation", self.fragmentation_nbytes),
        )  # fmt: skip
        listed = ", ".join(f"{format_nbytes(nbytes)} {name}" for name, nbytes in parts)
        outside = format_nbytes(self.outside_nbytes)
        return f"device    {format_nbytes(self.reserved_nbytes)} reserved: {listed}; {outside} outside the allocator"


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """A step of one rank. `points` are the steps of its program in order. `kinds`: the bytes of each kind by point, at the
    instant within the point at which most is live. `on`: where it ran. `planned_nbytes`: the peak that the plan predicts.
    `compute_seconds`: of operators and the update, measured, None on meta; `predicted_seconds`: the same by the plan's cluster
    model. `communication_seconds`: of all moves, by that model. `overlap_seconds`: the part of communication during which
    operators run. `step_seconds`: what a step is expected to take. `layers`: compute by class of layers and pass, named by the
    first layer; `operators`: by class of operators.
    `device_memory`: what a GPU needs besides. `ranks`: all ranks with this program and these sizes, in `rehearse_all`.

    >>> import scrimp
    >>> from scrimp import zoo
    >>> model, batch = zoo.build("gpt-tiny", layers=1), zoo.example_batch("gpt-tiny", batch=8)
    >>> plan = scrimp.plan(model, batch, "2xCPU", mesh="x=2", precision="fp32", time_limit=1)
    >>> found = scrimp.rehearse(plan, model, batch)
    >>> found.on, found.compute_seconds
    ('meta', None)
    >>> scrimp.Rehearsal.from_json(found.to_json()) == found
    True
    """

    rank: int
    stage: int
    on: str
    points: tuple[str, ...]
    kinds: Mapping[str, tuple[int, ...]]
    peak: RehearsedPeak
    planned_nbytes: int
    compute_seconds: float | None
    predicted_seconds: float
    communication_seconds: float
    overlap_seconds: float
    step_seconds: float
    layers: tuple[ComputeTime, ...] = ()
    operators: tuple[ComputeTime, ...] = ()
    device_memory: DeviceMemory | None = None
    ranks: tuple[int, ...] = ()

    @cached_property
    def totals(self) -> tuple[int, ...]:
        """Bytes by point."""
        return tuple(map(sum, zip(*self.kinds.values(), strict=True)))

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> Rehearsal:
        """Raises `ScrimpError` if the text is no rehearsal."""
        try:
            data: dict[str, Any] = json.loads(text)
        except json.JSONDecodeError as error:
            raise ScrimpError(f"the text is not JSON: {error}") from error
        check_format(data, FORMAT, VERSION, ScrimpError)
        try:
            del data["format"], data["version"]
            peak = data.pop("peak")
            device = data.pop("device_memory")
            alive = tuple(AliveTensor(**{**each, "shape": tuple(each["shape"])}) for each in peak.pop("alive"))
            return cls(
                **{
                    **data,
                    "points": tuple(data["points"]),
                    "kinds": {kind: tuple(row) for kind, row in data["kinds"].items()},
                    "ranks": tuple(data["ranks"]),
                    "layers": tuple(ComputeTime(**each) for each in data["layers"]),
                    "operators": tuple(ComputeTime(**each) for each in data["operators"]),
                },
                peak=RehearsedPeak(**peak, alive=alive),
                device_memory=None if device is None else DeviceMemory(**device),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ScrimpError(f"the text is not a rehearsal of `to_json`: {type(error).__name__} {error}") from error

    def summary(self) -> str:
        peak = self.peak
        who = f"rank {self.rank}" + (f", pipeline stage {self.stage}" if self.stage else "")
        more = len(self.ranks) - 1
        lines = [
            f"{who}{f' and {more} like it' if more > 0 else ''}, rehearsed on {self.on}, {len(self.points)} points",
            f"peak      {format_nbytes(peak.nbytes)}, {peak.nbytes / max(self.planned_nbytes, 1):.4f} of the plan's, "
            f"at {peak.where}",
            *(f"  {kind:<12}{format_nbytes(nbytes):>12}" for kind, nbytes in peak.kinds.items() if nbytes),
        ]
        for each in peak.alive[:SHOWN]:
            shape = " x ".join(map(str, each.shape)) or "one number"
            lines.append(f"  alive     {format_nbytes(each.nbytes):>12}  {each.kind}, {shape} {each.dtype}, of {each.made_at}")
        if len(peak.alive) > SHOWN:
            rest = sum(each.nbytes for each in peak.alive[SHOWN:])
            lines.append(f"  alive     {format_nbytes(rest):>12}  in {len(peak.alive) - SHOWN} more tensors")
        measured = "not measured" if self.compute_seconds is None else f"{self.compute_seconds:.4g} s measured"
        lines.append(f"compute   {measured}, {self.predicted_seconds:.4g} s predicted for the plan's cluster")
        lines += [
            f"  {each.name:<28}{each.measured_seconds:>10.4g} s, {each.predicted_seconds:.4g} s predicted, "
            f"{each.predicted_seconds / each.measured_seconds - 1:+.0%}"
            for each in self.operators
            if each.measured_seconds and each.predicted_seconds
        ]
        lines.append(
            f"moves     {self.communication_seconds:.4g} s predicted, of which {self.overlap_seconds:.4g} s beside operators"
        )
        if self.device_memory is not None:
            lines.append(self.device_memory.line())
        lines.append(f"step      {self.step_seconds:.4g} s expected")
        return "\n".join(lines)
