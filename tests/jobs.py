"""What the ranks of a pool do in tests; functions of a module, so that they can be sent to processes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from scrimp.layout import Layout, Mesh
from scrimp.move import Program, synthesize
from scrimp.move._simulate import scatter
from scrimp.move._comm import comm_for

Case = tuple[dict[str, int], tuple[int, ...], str, str]


def program_of(case: Case, *, dtype: str = "int64", direct: bool = True) -> Program:
    axes, shape, src, dst = case
    return synthesize(shape, Mesh(axes), src, dst, dtype=dtype, direct=direct)


def numbers(shape: tuple[int, ...]) -> np.ndarray:
    """Every element different."""
    return np.arange(1, int(np.prod(shape)) + 1, dtype=np.int64).reshape(shape)


def move_cases(cases: list[Case], direct: bool, native: bool = False, dtype: str = "int64") -> list[str]:
    """Run cases and compare this rank's tile with the oracle; what went wrong."""
    wrong = []
    for case in cases:
        program = program_of(case, dtype=dtype, direct=direct)
        comm = comm_for(program.mesh, None)
        assert comm is not None
        comm.native = native
        full = numbers(program.shape)
        local = torch.from_numpy(scatter(program, full)[comm.rank]).to(getattr(torch, dtype))
        before = local.clone()
        out = program.run(local)
        box = program.dst.tile(program.shape, program.mesh, comm.rank)
        want = torch.from_numpy(np.array(full[tuple(slice(a, b) for a, b in box)])).to(out.dtype)
        if out.shape != want.shape or not torch.equal(out, want):
            wrong.append(f"{program}: got {out.tolist()}, want {want.tolist()}")
        if not torch.equal(local, before):
            wrong.append(f"{program}: the kept input was changed")
        comm.native = False
    return wrong
