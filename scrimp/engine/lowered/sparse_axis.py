"""The mesh axis of a plan along which ranks exchange sparse gradients: one that replicates weights and states of all trained
parameters, as data parallelism without ZeRO does."""

from __future__ import annotations

from scrimp.chunks import Wire
from scrimp.engine.setup.process_groups import along
from scrimp.errors import RunError
from scrimp.exchange import Dense, Sparse
from scrimp.lower import Lowered, Rest


def exchanging_ranks(lowered: Lowered, exchange: Dense | Sparse | None, wire: Wire) -> tuple[str | None, Wire]:
    """The axis, and the ranks that differ from this one along it only. None, and this rank alone, if the exchange is dense."""
    if not isinstance(exchange, Sparse):
        return None, Wire()
    axis = sparse_axis(lowered, exchange.axis)
    return axis, along(wire, lowered.mesh, axis)


def sparse_axis(lowered: Lowered, given: str | None) -> str:
    """`given`: by the user. Otherwise the only axis that is possible and along which gradients are summed. Raises `RunError` with
    the first parameter that is sharded."""
    mesh = lowered.mesh
    if given is not None and given not in mesh.names:
        raise RunError(f"Sparse(axis={given!r}): the plan's mesh is {mesh}")
    if given is None and mesh.size == 1:
        return mesh.names[0]
    axes = [axis for axis in mesh.names if mesh.axis_size(axis) > 1] if given is None else [given]
    why = {axis: reason for axis in axes if (reason := _sharded(lowered, axis)) is not None}
    if len(why) == len(axes):
        raise RunError(
            "exchange=Sparse(...) needs a mesh axis along which the plan replicates weight and states of all trained parameters: "
            f"{'; '.join(why.values())}. Plan with data parallelism along one axis, without ZeRO there, or use Dense()"
        )
    possible = [axis for axis in axes if axis not in why]
    if given is not None:
        return given
    summed = [axis for axis in possible if _is_summed(lowered, axis)] or possible
    if len(summed) > 1:
        raise RunError(
            f"exchange=Sparse(...) is possible along {' and '.join(summed)} in this plan: choose one, such as "
            f"Sparse(axis={summed[0]!r}); along the others gradients are summed whole"
        )
    return summed[0]


def _sharded(lowered: Lowered, axis: str) -> str | None:
    """The first trained parameter that is sharded along an axis, and what of it."""
    for each in lowered.rest.values():
        if each.trained and (what := _what(each, axis)) is not None:
            return f"along {axis} {what} of {each.name}"
    return None


def _what(each: Rest, axis: str) -> str | None:
    if axis in each.use.axes:
        return f"ranks have tiles {each.use}"
    if axis in each.weight:
        return "ranks shard the weight"
    if axis in each.gradient:
        return "ranks shard gradient and optimizer states"
    return "ranks shard the optimizer states" if axis in each.states else None


def _is_summed(lowered: Lowered, axis: str) -> bool:
    return any(axis in (axes or ()) for each in lowered.partials.values() for axes in each)
