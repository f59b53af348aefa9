"""A program: the steps that take an array from one layout to another, with their costs.

Kinds of step (`axes` are prime sub-axes of the mesh, major first; a dim's axes are a stack with the minor one on top):

    slice           axes no dim uses are pushed on `dim`; every device keeps its part, nothing is sent
    reduce_scatter  partial axes are pushed on `dim`; the summands of a group are added, each keeps its part
    all_reduce      partial axes become replicas
    all_to_all      the top axes of `dim` become the top axes of `to_dim`
    permute         any relabelling that leaves every dim cut into as many tiles: whole tiles change hands
    exchange        any change that leaves the local size: a permute and all-to-alls in one alltoallv
    all_gather      the top axes of `dim` are popped
    direct          anything without sums, as one alltoallv of exactly the missing parts

The array first falls in size (slice, reduce_scatter), then stays (all_to_all, permute, exchange), then rises
(all_gather). That order alone bounds it by the larger of source and target.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from scrimp.errors import MoveError, check_format
from scrimp.layout import Layout, Mesh, merge_axes
from scrimp.move.plan.dtypes import ITEMSIZE

if TYPE_CHECKING:
    import numpy as np
    import torch

FORMAT, VERSION = "scrimp.move", 1

FALL = ("slice", "reduce_scatter", "all_reduce")
FLAT = ("all_to_all", "permute", "exchange")
KINDS = (*FALL, *FLAT, "all_gather", "direct")


@dataclass(frozen=True, kw_only=True)
class Step:
    """One operation, entered by every device of the mesh. `received_numel` and `messages`: of the device that receives most;
    layouts are over prime sub-axes."""

    kind: str
    before: Layout
    after: Layout
    axes: tuple[str, ...] = ()
    dim: int | None = None
    to_dim: int | None = None
    received_numel: int = 0
    messages: int = 0
    seconds: float = 0.0

    def describe(self, mesh: Mesh) -> str:
        """`all_to_all y, dim 0 -> 1`, with complete axes named where possible."""
        words = self.kind
        if self.axes:
            words += " " + "*".join(merge_axes(self.axes, mesh))
        if self.dim is not None:
            words += f", dim {self.dim}" + (f" -> {self.to_dim}" if self.to_dim is not None else "")
        return words


@dataclass(frozen=True, kw_only=True)
class Program:
    """Made by `synthesize`. `src` and `dst` are as the user gave them.

    >>> import numpy, scrimp
    >>> program = scrimp.synthesize((8, 8), scrimp.Mesh({"x": 2}), "[x,-]", "[-,x]")
    >>> [part.shape for part in program.simulate(numpy.zeros((8, 8), dtype="float32"))]
    [(8, 4), (8, 4)]
    """

    shape: tuple[int, ...]
    padded: tuple[int, ...]
    mesh: Mesh
    src: Layout
    dst: Layout
    dtype: str
    steps: tuple[Step, ...]

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @cached_property
    def in_numel(self) -> int:
        return self.src.local_numel(self.shape, self.mesh)

    @cached_property
    def out_numel(self) -> int:
        return self.dst.local_numel(self.shape, self.mesh)

    @property
    def cap_numel(self) -> int:
        """The limit of the array on every device: the larger of source and target tile."""
        return max(self.in_numel, self.out_numel)

    @cached_property
    def peak_numel(self) -> int:
        """The largest local array before, between and after the steps."""
        return max(
            self.in_numel,
            self.out_numel,
            *(step.after.local_numel(self.shape, self.mesh, self.padded) for step in self.steps[:-1]),
        )

    @cached_property
    def received_nbytes(self) -> int:
        """Bytes received by the busiest device, summed over the steps."""
        return sum(step.received_numel for step in self.steps) * self.itemsize

    @cached_property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps)

    @cached_property
    def hash(self) -> str:
        """Equal on two ranks exactly when their programs are equal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def __str__(self) -> str:
        steps = "; ".join(step.describe(self.mesh) for step in self.steps) or "nothing to do"
        return f"{self.src} -> {self.dst} of {self.dtype}{list(self.shape)} on {self.mesh}: {steps}"

    def check(self) -> Program:
        """Proves the program by the typing rules, independently of the search; raises `MoveError` if it is wrong."""
        from scrimp.move.checker import check

        check(self)
        return self

    def simulate(self, array: np.ndarray) -> list[np.ndarray]:
        """Runs all ranks in this process, by the definition of the steps; returns the local array of every rank."""
        from scrimp.move.simulator import simulate

        return simulate(self, array)

    def run(self, local: torch.Tensor, *, group: Any = None, donate: bool = False) -> torch.Tensor:
        """Runs this rank's part on `torch.distributed`; see `scrimp.move.run.run`."""
        from scrimp.move.run.run import run_program

        return run_program(self, local, group=group, donate=donate)

    def to_json(self) -> str:
        steps = []
        for step in self.steps:
            row = asdict(step)
            row["before"], row["after"] = str(step.before), str(step.after)
            steps.append(row)
        data = {
            "format": FORMAT, "version": VERSION, "shape": self.shape, "padded": self.padded, "mesh": self.mesh.axes,
            "src": str(self.src), "dst": str(self.dst), "dtype": self.dtype, "steps": steps,
        }  # fmt: skip
        return json.dumps(data, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Program:
        data = json.loads(text)
        check_format(data, FORMAT, VERSION, MoveError)

        def step(row: dict[str, Any]) -> Step:
            layouts = {"before": Layout.parse(row["before"]), "after": Layout.parse(row["after"])}
            return Step(**{**row, **layouts, "axes": tuple(row["axes"])})

        return cls(
            shape=tuple(data["shape"]),
            padded=tuple(data["padded"]),
            mesh=Mesh([(name, size) for name, size in data["mesh"]]),
            src=Layout.parse(data["src"]),
            dst=Layout.parse(data["dst"]),
            dtype=data["dtype"],
            steps=tuple(step(row) for row in data["steps"]),
        ).check()


def padding(shape: Sequence[int], mesh: Mesh, src: Layout, dst: Layout) -> tuple[int, ...] | None:
    """The sizes to cut so that tiles of src, dst and everything between nest; None where there are none.

    A tile of ceil(g/n) is a tile of the padded size G exactly when G = n * ceil(g/n), and a whole dim is a
    tile of every G. So src and dst must ask for the same G, or one of them must leave the dim whole.
    """
    padded = []
    for size, n_src, n_dst in zip(shape, src.counts(mesh), dst.counts(mesh), strict=True):
        wanted = {n * -(-size // n) for n in (n_src, n_dst) if n > 1} or {size}
        if len(wanted) > 1:
            return None
        padded.append(wanted.pop())
    return tuple(padded)
