"""What a device needs beside a plan's live storages, part by part.

    context          the CUDA context with the code of loaded kernels; outside torch's allocator
    workspace        what kernels take while they run, and what cuBLAS keeps (cuBLAS, cuDNN, attention); inside the allocator
    rounding         the allocator gives whole blocks of 512 bytes
    fragmentation    reserved by the allocator, and not allocated
    NCCL             buffers of communicators; outside the allocator

`scrimp probe` measures context, workspace and the size of a block, a rehearsal on CUDA measures rounding and fragmentation. NCCL
is always an estimate: one GPU has no peers, so nothing there is representative.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import combinations
from math import ceil, isfinite, prod
from typing import Any

from scrimp.errors import ScrimpError
from scrimp.layout import Mesh
from scrimp.ledger import format_nbytes

CPU = "CPU"  # the kind of a cluster of processes: no context, no allocator, no NCCL
MEASURED, ESTIMATED, GIVEN = "measured", "estimated", "given"
CONTEXT, WORKSPACE, ROUNDING, FRAGMENTATION, NCCL = PARTS = ("context", "workspace", "rounding", "fragmentation", "NCCL")


@dataclass(frozen=True, kw_only=True)
class ReservePart:
    """One part of a device's reserve. `source`: "measured", "estimated", or "given" by the user."""

    name: str
    nbytes: int
    source: str

    def __str__(self) -> str:
        return f"{self.name} {format_nbytes(self.nbytes)} ({self.source})"


@dataclass(frozen=True, kw_only=True)
class Reserve:
    """Bytes that a device needs beside live storages. `rounding_share` and `fragmentation_share` are relative to live bytes.
    `device`, `torch`: where the figures that `measured` names were measured; the others are estimates. `observed`: single
    measurements behind them, for readers.

    NCCL, an estimate: each communicator has, on each of `nccl_channels` channels, a connection to each of at most `nccl_peers`
    peers, and each connection takes `nccl_connection_nbytes`. Rings and trees connect a rank to few peers, however many ranks
    there are; an all-to-all connects it to all of them, and takes more than this."""

    device: str
    torch: str = ""
    context_nbytes: int = 0
    workspace_nbytes: int = 0
    block_nbytes: int = 512
    rounding_share: float = 0.0
    fragmentation_share: float = 0.0
    nccl_channels: int = 0
    nccl_peers: int = 2
    nccl_connection_nbytes: int = 0
    measured: tuple[str, ...] = ()
    observed: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name.endswith(("_nbytes", "_channels", "_peers")) and not (type(value) is int and value >= 0):
                raise ScrimpError(f"a reserve with {each.name}={value!r}: it is a whole number of 0 or more")
            if each.name.endswith("_share") and not (isfinite(value) and value >= 0):
                raise ScrimpError(f"a reserve with {each.name}={value!r}: a share is 0 or more")
        if not {*self.measured} <= {*PARTS}:
            raise ScrimpError(f"a reserve whose measured parts are {', '.join(self.measured)}: the parts are {', '.join(PARTS)}")

    def parts(self, live_nbytes: int, groups: Sequence[int] = ()) -> tuple[ReservePart, ...]:
        """What a device needs beside so many live bytes. `groups`: the number of ranks of each of its communicators. A part of 0
        bytes is left out."""
        sizes = {
            CONTEXT: self.context_nbytes,
            WORKSPACE: self.workspace_nbytes,
            ROUNDING: ceil(self.rounding_share * live_nbytes),
            FRAGMENTATION: ceil(self.fragmentation_share * live_nbytes),
            NCCL: sum(map(self.communicator_nbytes, groups)),
        }
        return tuple(
            ReservePart(name=name, nbytes=nbytes, source=MEASURED if name in self.measured else ESTIMATED)
            for name, nbytes in sizes.items()
            if nbytes
        )

    def needed_nbytes(self, live_nbytes: int, groups: Sequence[int] = ()) -> int:
        """Of a device with so many live bytes: these, and all parts beside them."""
        return live_nbytes + sum(part.nbytes for part in self.parts(live_nbytes, groups))

    def live_nbytes(self, budget_nbytes: int, groups: Sequence[int] = ()) -> int:
        """The most live bytes of which the need is within the budget; negative where the parts alone exceed it."""
        fixed = self.needed_nbytes(0, groups)
        if budget_nbytes < fixed:
            return budget_nbytes - fixed
        live = int((budget_nbytes - fixed) / (1 + self.rounding_share + self.fragmentation_share))
        while live and self.needed_nbytes(live, groups) > budget_nbytes:
            live -= 1
        while self.needed_nbytes(live + 1, groups) <= budget_nbytes:
            live += 1
        return live

    def communicator_nbytes(self, ranks: int) -> int:
        """Of one communicator, estimated: channels x peers x bytes of a connection."""
        return self.nccl_channels * min(max(ranks - 1, 0), self.nccl_peers) * self.nccl_connection_nbytes

    def rehearsed(self, rounding_share: float, fragmentation_share: float) -> Reserve:
        """With the shares that a rehearsal on CUDA measured."""
        measured = tuple(name for name in PARTS if name in {*self.measured, ROUNDING, FRAGMENTATION})
        return replace(self, rounding_share=rounding_share, fragmentation_share=fragmentation_share, measured=measured)

    def rows(self) -> list[tuple[str, str, str]]:
        """Part, figure and source, as text; then single measurements."""

        def source(name: str) -> str:
            return MEASURED if name in self.measured else ESTIMATED

        connection = f"{self.nccl_channels} channels x {self.nccl_peers} peers x {format_nbytes(self.nccl_connection_nbytes)}"
        return [
            (CONTEXT, format_nbytes(self.context_nbytes), source(CONTEXT)),
            (WORKSPACE, format_nbytes(self.workspace_nbytes), source(WORKSPACE)),
            (ROUNDING, f"{self.rounding_share:.2%} of live bytes; blocks of {self.block_nbytes} B", source(ROUNDING)),
            (FRAGMENTATION, f"{self.fragmentation_share:.2%} of live bytes", source(FRAGMENTATION)),
            (NCCL, f"{connection} a communicator, at most", source(NCCL)),
            *((f"  {name}", f"{nbytes:,} B", MEASURED) for name, nbytes in self.observed),
        ]

    def to_data(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Reserve:
        try:
            tuples = {"measured": tuple(data["measured"]), "observed": tuple((name, nbytes) for name, nbytes in data["observed"])}
            return cls(**{**data, **tuples})
        except (KeyError, TypeError, ValueError) as error:
            raise ScrimpError(f"a cluster's reserve cannot be read: {type(error).__name__} {error}") from error


# The constants of devices, by the kind of a preset. A kind without a row in `RESERVES` has those of `_CUDA`. A row of a measured
# kind names the parts that were measured.
# `Cluster.reserve`, as `scrimp probe` measures it on the device at hand, has precedence over this table.
_CUDA = Reserve(
    device="CUDA",
    # Assumed: nvidia-smi shows 0.4 to 0.6 GiB for an idle process of PyTorch on A100 and H100, with the
    # kernels that it has loaded.
    context_nbytes=600 << 20,
    # cuBLAS: 32 MiB on Hopper, 8.1 MiB on others (its documentation, CUBLAS_WORKSPACE_CONFIG); cuBLASLt in torch: 32 MiB on
    # Hopper; cuDNN and the backward of attention: assumed.
    workspace_nbytes=128 << 20,
    block_nbytes=512,  # kMinBlockSize of torch's c10/cuda/CUDACachingAllocator
    rounding_share=0.002,  # assumed
    fragmentation_share=0.05,  # assumed
    # NCCL's src/include/device.h: buffers for Simple (4 MiB), LL (512 KiB) and LL128 (4.7 MiB) where a rank receives, in pages of
    # 2 MiB: 10 MiB; one such page where it sends. Both are in the log of NVIDIA/nccl issue 1685. 16 channels: assumed, an H100
    # with NVLink may have 32.
    nccl_channels=16,
    nccl_peers=2,
    nccl_connection_nbytes=12 << 20,
)
NOTHING = Reserve(device="cpu")
# One H200, torch 2.11, CUDA 13.0: `scrimp probe`; then rank 0 of 18 plans (`python -m bench.rehearse.gpu`). Rounding was below
# 0.1 % of the live bytes. With the engine's expandable segments fragmentation was 0.2 to 5.5 %, once 14 %, and at most 1.1 GiB.
_H200 = replace(
    _CUDA, device="NVIDIA H200", torch="2.11.0+cu130", context_nbytes=800_653_312, workspace_nbytes=202_375_680,
    rounding_share=0.001, fragmentation_share=0.055, measured=(CONTEXT, WORKSPACE, ROUNDING, FRAGMENTATION),
)  # fmt: skip
RESERVES: Mapping[str, Reserve] = {CPU: NOTHING, "H200": _H200}


def known_reserve(kind: str) -> Reserve:
    """The constants of a kind of device."""
    return RESERVES.get(kind, _CUDA)


def groups_of(mesh: Mesh, stages: int = 1) -> tuple[int, ...]:
    """Ranks of each communicator of a device: the default group of all ranks, and one for each set of mesh axes with two ranks or
    more. A plan's moves may use fewer: which sets they use is known only after the plan is made."""
    sizes = [size for _, size in mesh.axes if size > 1]
    sets = [prod(chosen) for count in range(1, len(sizes) + 1) for chosen in combinations(sizes, count)]
    ranks = stages * mesh.size
    return (ranks, *sets) if ranks > 1 else ()
