"""Ways to use moves that once gave wrong values, crashed or hung; each returns what went wrong, or None."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DeviceMesh, Replicate, Shard, distribute_tensor, init_device_mesh

import scrimp
from scrimp.errors import MoveError
from scrimp.layout import Mesh
from scrimp.move import synthesize
from scrimp.move.run.many import redistribute_many

MESH = Mesh({"x": 4})
FULL = torch.arange(16.0).reshape(4, 4)


def mine() -> torch.Tensor:
    rank = dist.get_rank()
    return FULL[rank : rank + 1].clone()


def kinds_of_partial() -> str | None:
    """Norms and masked embeddings are subclasses of Partial with rules of their own."""
    mesh = init_device_mesh("cpu", (4,))
    table = distribute_tensor(torch.arange(1.0, 17).reshape(8, 2), mesh, [Shard(0)])
    rows = torch.tensor([0, 3, 5])
    ids = distribute_tensor(rows, mesh, [Replicate()])
    whole = torch.arange(1.0, 17).reshape(8, 2)
    cases = [(torch.linalg.vector_norm(table), whole.norm()), (nn.functional.embedding(ids, table), whole[rows])]
    for tensor, want in cases:
        got = scrimp.redistribute(tensor, [Replicate()]).to_local()
        if not torch.allclose(got, want):
            return f"{tensor.placements}: {got} is not {want}"
    return None


def beside_the_users_own_messages() -> str | None:
    program = synthesize((4, 4), MESH, "[x,-]", "[-,x]")
    program.run(mine())
    rank = dist.get_rank()
    buffer = torch.full((1,), -1.0)
    waiting = dist.irecv(buffer, src=1) if rank == 0 else None
    dist.barrier()
    out = program.run(mine())
    if rank == 1:
        dist.send(torch.full((1,), 777.0), dst=0)
    if waiting is not None:
        waiting.wait()
        if buffer.item() != 777:
            return f"the user's message became {buffer}"
    return None if torch.equal(out, FULL[:, rank : rank + 1]) else f"{out}"


def one_tensor_twice_donated() -> str | None:
    rank = dist.get_rank()
    for bucket in (1, 1 << 20):
        tied = mine()
        moves = [(tied, "[x,-]", "[-,x]"), (tied, "[x,-]", "[-,-]"), (tied, "[x,-]", "[x,-]")]
        outs = redistribute_many(moves, MESH, donate=True, bucket_nbytes=bucket)
        wanted = [FULL[:, rank : rank + 1], FULL, FULL[rank : rank + 1]]
        if not all(torch.equal(out, want) for out, want in zip(outs, wanted, strict=True)):
            return f"bucket {bucket}: {outs}"
    return None


def odd_inputs() -> str | None:
    """A column of one element, conjugate and negative views, an expanded view that is donated."""
    mesh = init_device_mesh("cpu", (4,))
    full = torch.arange(14.0).reshape(7, 2)
    column = distribute_tensor(full, mesh, [Shard(0)])[:, 0]
    if not torch.equal(scrimp.redistribute(column, [Replicate()]).to_local(), full[:, 0]):
        return "a column"
    rank = dist.get_rank()
    numbers = torch.complex(FULL, -FULL)
    out = synthesize((4, 4), MESH, "[x,-]", "[-,-]", dtype="complex64").run(numbers[rank : rank + 1].conj())
    if not torch.equal(out, numbers.conj().resolve_conj()):
        return "conjugate"
    out = synthesize((4, 4), MESH, "[x,-]", "[-,-]").run(torch._neg_view(mine()))
    if not torch.equal(out, -FULL):
        return "negative"
    base = torch.arange(4.0)
    expanded = base[:2].unsqueeze(0).expand(2, 2)
    synthesize((8, 2), MESH, "[x,-]", "[-,-]").run(expanded, donate=True)
    return None if base.tolist() == [0, 1, 2, 3] else f"the base of an expanded view became {base}"


def names_that_contradict() -> str | None:
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("y", "x"))
    try:
        synthesize((4, 4), Mesh({"x": 2, "y": 2}), "[x,-]", "[-,-]").run(torch.ones(2, 4), group=device_mesh)
    except MoveError as error:
        return None if "('y', 'x')" in str(error) and "('x', 'y')" in str(error) else str(error)
    return "no error"


def not_a_member() -> str | None:
    device_mesh = DeviceMesh("cpu", [0, 1])  # made by all, as torch asks
    program = synthesize((4, 4), Mesh({"x": 2}), "[x,-]", "[-,-]")
    try:
        program.run(torch.ones(2, 4), group=device_mesh)
    except MoveError as error:
        return None if dist.get_rank() >= 2 and "not among the ranks [0, 1]" in str(error) else str(error)
    return None if dist.get_rank() < 2 else "no error"


def wrong_box() -> str | None:
    """A wrong local shape on the path of nested tiles is an error on every rank."""
    from scrimp.move.run.run import run_between

    rank = dist.get_rank()
    boxes = [((k, k + 1), (0, 4)) for k in range(4)]
    whole = [((0, 4), (0, 4))] * 4
    local = torch.ones(2, 4) if rank == 1 else torch.ones(1, 4)
    try:
        run_between(MESH, boxes, whole, local, sums=(), key="ab" * 32)
    except MoveError as error:
        return None if "rank 1" in str(error) else str(error)
    return "no error"
