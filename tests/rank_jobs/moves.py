"""What the ranks of a pool do in tests; functions of a module, so that they can be sent to processes."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import init_device_mesh

from scrimp.chunks import Wire
from scrimp.cli.demo.train import most_live
from scrimp.cluster import Cluster
from scrimp.errors import MoveError
from scrimp.layout import Layout, Mesh
from scrimp.move import Program, Step, synthesize
from scrimp.move.plan.steps import priced
from scrimp.move.run.comm import comm_for, end_group
from scrimp.move.run.execute import overload, stage_nbytes
from scrimp.move.run.many import redistribute_many
from scrimp.move.run.torch_private import own_group
from scrimp.move.simulator import scatter

Case = tuple[dict[str, int], tuple[int, ...], str, str]


def program_of(case: Case, *, dtype: str = "int64", direct: bool = True) -> Program:
    axes, shape, src, dst = case
    return synthesize(shape, Mesh(axes), src, dst, dtype=dtype, direct=direct)


def numbers(shape: tuple[int, ...]) -> np.ndarray:
    """Every element different."""
    return np.arange(1, int(np.prod(shape)) + 1, dtype=np.int64).reshape(shape)


def tile_of(full: np.ndarray, layout: Layout | str, mesh: Mesh, rank: int) -> torch.Tensor:
    box = Layout.parse(layout).tile(full.shape, mesh, rank)
    return torch.from_numpy(np.array(full[tuple(slice(a, b) for a, b in box)]))


def move_cases(cases: list[Case], direct: bool, native: bool | None = None, device: str = "cpu") -> list[str]:
    """Run cases and compare this rank's tile with the oracle; what went wrong."""
    wrong = []
    for case in cases:
        program = program_of(case, direct=direct)
        comm = comm_for(program.mesh, None)
        assert comm is not None
        comm.native = native  # the code path of NCCL, on gloo
        full = numbers(program.shape)
        local = torch.from_numpy(scatter(program, full)[comm.rank]).to(device)
        before = local.clone()
        out = program.run(local)
        comm.native = None
        want = tile_of(full, program.dst, program.mesh, comm.rank).to(device)
        if out.shape != want.shape or not torch.equal(out, want) or not out.is_contiguous():
            wrong.append(f"{program}: got {out.tolist()}, want {want.tolist()}")
        if not torch.equal(local, before):
            wrong.append(f"{program}: the kept input was changed")
        if program.steps and local.numel() and out.untyped_storage().data_ptr() == local.untyped_storage().data_ptr():
            wrong.append(f"{program}: the result shares memory with a kept input")
    return wrong


def moves_on_groups_that_end(turns: int) -> list[str]:
    """One group after another, each with moves on other sub-groups of it; rank 0 has a group more than the others."""
    wrong, alone = [], own_group([0], None) if dist.get_rank() == 0 else None
    for turn in range(turns):
        group = dist.new_group()
        axes = {"x": 2, "y": 4} if turn % 2 else {"x": 4, "y": 2}
        for dst in ("[-,y]", "[x,-]")[: 1 + turn % 3 % 2]:
            program = program_of((axes, (8, 8), "[x,y]", dst))
            comm = comm_for(program.mesh, group)
            assert comm is not None
            comm.native = True
            full = numbers(program.shape)
            out = program.run(torch.from_numpy(scatter(program, full)[comm.rank]), group=comm)
            if not torch.equal(out, tile_of(full, program.dst, program.mesh, comm.rank)):
                wrong.append(f"turn {turn}, {program}: {out}")
        end_group(group)
    if alone is not None:
        dist.destroy_process_group(alone)
    return wrong


def every_dtype(cases: list[Case], dtypes: list[str]) -> list[str]:
    """Bit patterns must arrive as they left, whatever the dtype."""
    wrong = []
    for case in cases:
        for name in dtypes:
            program = program_of(case, dtype=name)
            dtype = getattr(torch, name)
            rng = np.random.default_rng(0)
            high = 2 if name == "bool" else 256
            full = torch.from_numpy(rng.integers(0, high, size=(*program.shape, dtype.itemsize), dtype=np.uint8))
            box = [slice(a, b) for a, b in program.src.tile(program.shape, program.mesh, dist.get_rank())]
            goal = [slice(a, b) for a, b in program.dst.tile(program.shape, program.mesh, dist.get_rank())]
            local = full[tuple(box)].contiguous().view(dtype).squeeze(-1)
            out = program.run(local)
            if out.dtype != dtype or not torch.equal(out.unsqueeze(-1).view(torch.uint8), full[tuple(goal)]):
                wrong.append(f"{program}")
    return wrong


def sums(dtypes: list[str]) -> list[str]:
    wrong = []
    for name in dtypes:
        for native in (False, True):
            for dst in ("[-,-]", "[x,y]", "[y,-]"):
                program = program_of(({"x": 2, "y": 4}, (16, 8), "[-,-]+x+y", dst), dtype=name)
                comm = comm_for(program.mesh, None)
                assert comm is not None
                # gloo itself cannot add these; NCCL can.
                comm.native = native and name not in ("int16", "int8", "uint8", "complex32")
                full = numbers((16, 8)) % 3
                out = program.run(torch.from_numpy(full * (comm.rank + 1)).to(getattr(torch, name)))
                comm.native = None
                want = tile_of(full * 36, dst, program.mesh, comm.rank).to(getattr(torch, name))
                if not torch.equal(torch.view_as_real(out) if out.is_complex() else out,
                                   torch.view_as_real(want) if out.is_complex() else want):  # fmt: skip
                    wrong.append(f"{program} native={native}: {out} != {want}")
    return wrong


def peak_nbytes(case: Case, donate: bool, direct: bool) -> tuple[int, int, int, bool]:
    """The most that lived during a run, by the profiler's memory events, input included; local bytes in and out."""
    program = program_of(case, dtype="float32", direct=direct)
    local = torch.ones(program.src.local_shape(program.shape, program.mesh, dist.get_rank()))
    program.run(local)
    dist.barrier()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        given = local.clone()  # in here, because the profiler sees no end of what began before it
        out = program.run(given, donate=donate)
    return most_live(profile), local.nbytes, out.nbytes, given.untyped_storage().nbytes() == 0


def in_rounds(donate: bool) -> tuple[bool, int, int, int]:
    """Three rows on three of eight ranks, wanted by all: the holders must send more than a tile, so it goes in rounds."""
    mesh, shape = Mesh({"x": 2, "y": 4}), (3, 1 << 20)
    src, dst = Layout.parse("[x*y,-]"), Layout.parse("[-,x]")
    step = Step(kind="direct", before=src.split(mesh), after=dst.split(mesh))
    steps = priced((step,), shape, shape, mesh, Cluster(), 4)
    program = Program(shape=shape, padded=shape, mesh=mesh, src=src, dst=dst, dtype="float32", steps=steps).check()
    full = numbers(shape).astype(np.float32)
    rank = dist.get_rank()
    local = tile_of(full, src, mesh, rank)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        out = program.run(local.clone(), donate=donate)
    promise = 2 * program.cap_numel * 4 + stage_nbytes(program.cap_numel * 4) + (0 if donate else local.nbytes)
    return torch.equal(out, tile_of(full, dst, mesh, rank)), overload(program, rank), most_live(profile), promise


def on_device_mesh(shape: tuple[int, ...], src: str, dst: str, ranks: list[list[int]]) -> str | None:
    """A DeviceMesh may number its ranks as it likes, and may leave some out."""
    from torch.distributed.tensor import DeviceMesh

    device_mesh = DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=("x", "y"))
    coordinate = device_mesh.get_coordinate()
    if coordinate is None:
        return None
    mesh = Mesh({"x": len(ranks), "y": len(ranks[0])})
    me = coordinate[0] * len(ranks[0]) + coordinate[1]
    full = numbers(shape)
    program = synthesize(shape, mesh, src, dst, dtype="int64")
    for native in (False, True):
        comm = comm_for(mesh, device_mesh)
        assert comm is not None
        comm.native = native
        out = program.run(tile_of(full, src, mesh, me), group=device_mesh)
        if not torch.equal(out, tile_of(full, dst, mesh, me)):
            return f"native={native}: {out.tolist()}"
    return None


def many(items: list[tuple[tuple[int, ...], str, str]], native: bool, bucket_nbytes: int, donate: bool) -> tuple[list[str], int]:
    """Move many tensors; what went wrong, and how many calls to the network were made."""
    mesh = Mesh({"x": 2, "y": 4})
    comm = comm_for(mesh, None)
    assert comm is not None
    comm.native = native
    dtypes = [torch.int64, torch.float32, torch.bfloat16]
    given, wanted = [], []
    for k, (shape, src, dst) in enumerate(items):
        full, dtype = numbers(shape), dtypes[k % 3] if "+" not in src else torch.int64
        if "+" in src:
            local = torch.from_numpy(scatter(synthesize(shape, mesh, src, dst, dtype="int64"), full)[comm.rank])
        else:
            local = tile_of(full, src, mesh, comm.rank).to(dtype)
        given.append((local, src, dst, shape))
        wanted.append(tile_of(full, dst, mesh, comm.rank).to(dtype))
    calls = 0
    post = comm.post

    def counted(requests: Any, tag: int = 0, *, ahead: bool = False) -> Any:
        nonlocal calls
        calls += 1
        return post(requests, tag, ahead=ahead)

    comm.post = counted  # type: ignore[method-assign]
    try:
        out = redistribute_many(given, mesh, bucket_nbytes=bucket_nbytes, donate=donate)
    finally:
        comm.post = post  # type: ignore[method-assign]
        comm.native = None
    bad = [f"{items[k]}: {a} != {b}" for k, (a, b) in enumerate(zip(out, wanted, strict=True)) if not torch.equal(a, b)]
    return bad, calls


def fault(kind: str) -> str:
    """Do one thing wrong on rank 1 (or for all); the MoveError every rank must see."""
    mesh = Mesh({"x": 4})
    rank = dist.get_rank()
    program = synthesize((8, 8), mesh, "[x,-]", "[-,x]")
    local = torch.ones(2, 8)
    start = time.monotonic()
    try:
        if kind == "shape":
            program.run(torch.ones(3, 8) if rank == 1 else local)
        elif kind == "dtype":
            program.run(local.double() if rank == 1 else local)
        elif kind == "program":
            dst = "[-,-]" if rank == 1 else "[-,x]"
            synthesize((8, 8), mesh, "[x,-]", dst).run(local)
        elif kind == "mesh":
            synthesize((8, 8), Mesh({"x": 8}), "[x,-]", "[-,x]").run(torch.ones(1, 8))
        elif kind == "device mesh":
            program.run(local, group=init_device_mesh("cpu", (2, 2)))
        elif kind == "late shape":
            program.run(local)
            program.run(torch.ones(3, 8) if rank == 1 else local)
        elif kind == "dead":
            program.run(local)
            if rank == 1:
                os._exit(7)
            for _ in range(100):
                program.run(local)
                time.sleep(0.02)
        elif kind == "hung":
            program.run(local)
            if rank == 1:
                time.sleep(8)
            else:
                program.run(local)
        elif kind == "many":
            redistribute_many([(local, "[x,-]", "[-,x]"), (torch.ones(2 + rank % 2, 8), "[x,-]", "[-,x]", (8, 8))], mesh)
    except MoveError as error:
        return f"{error} [after {time.monotonic() - start:.1f} s]"
    return "no error"


def nccl_hello() -> float:
    total = torch.ones(1, device="cuda")
    dist.all_reduce(total)
    return float(total)


def given_values(rank: int, *, same: bool) -> list[torch.Tensor]:
    torch.manual_seed(0 if same else rank)
    shapes = [(3, 4), (), (5,), (0,), (1000, 30), (2, 2)]
    found = [torch.randn(shape) for shape in shapes]
    return [*found, torch.randn(6).bfloat16(), torch.randn(4, 6).t(), torch.arange(3) + rank * (not same)]


def each_from_first(*, same: bool, joined_nbytes: int) -> dict[str, object]:
    import scrimp.chunks.transfer.collectives as module

    before, module.JOINED_NBYTES = module.JOINED_NBYTES, joined_nbytes
    try:
        rank, sent = dist.get_rank(), [0]
        wire = Wire(dist.get_world_size(), rank)
        plain = wire.from_first

        def counted(tensor: torch.Tensor) -> torch.Tensor:
            sent[0] += 1
            return plain(tensor)

        wire.from_first = counted  # type: ignore[method-assign]
        found = list(wire.each_from_first(given_values(rank, same=same)))
    finally:
        module.JOINED_NBYTES = before
    wanted = given_values(0, same=same)
    alike = [
        one.dtype == two.dtype and one.shape == two.shape and torch.equal(one, two)
        for one, two in zip(found, wanted, strict=True)
    ]
    return {"alike": alike, "sent": sent[0]}
