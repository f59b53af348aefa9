"""The private attribute of DTensor that `redistribute` needs: the order in which mesh dims split a tensor dim."""

from __future__ import annotations

from torch.distributed.tensor import DTensor


def shard_order(dtensor: DTensor) -> dict[int, tuple[int, ...]] | None:
    """For each tensor dim its mesh dims, major first; None where this torch lacks it (before 2.12)."""
    order = getattr(dtensor._spec, "shard_order", None)
    return None if order is None else {entry.tensor_dim: tuple(entry.mesh_dims) for entry in order}
