"""Places meshes on nodes: the link of each axis, and the mesh shapes worth a search.

Ranks fill the nodes in order, and the last axis of a mesh is the fastest: with k devices on a node, an axis of n whose neighbours
are s ranks apart lies inside of nodes exactly when s * n divides k, and has one member on a node exactly when k divides s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from scrimp.cluster._hardware import Hardware
from scrimp.cluster._link import Link
from scrimp.errors import ScrimpError
from scrimp.layout import Mesh

NAMES = "xyzwvu"


@dataclass(frozen=True, kw_only=True)
class AxisLink:
    """`inside`: the share of a device's peers along the axis that are on its node, over all devices. 1: the axis uses the link
    inside nodes. Less: all its traffic counts on the slower link between nodes."""

    link: Link
    inside: float


@lru_cache(maxsize=256)
def axis_links(hardware: Hardware, mesh: Mesh) -> Mapping[str, AxisLink]:
    if mesh.size > hardware.devices:
        raise ScrimpError(
            f"mesh {mesh} has {mesh.size} devices, the cluster {hardware.devices} ({hardware.nodes} nodes of "
            f"{hardware.devices_per_node}); a mesh may have at most as many"
        )
    links = {}
    for axis, size in mesh.axes:
        share = _inside(mesh, axis, hardware.devices_per_node) if size > 1 else 1.0
        links[axis] = AxisLink(link=hardware.inside_link if share == 1 else _slower(hardware), inside=share)
    return MappingProxyType(links)


def _slower(hardware: Hardware) -> Link:
    inside, between = hardware.inside_link, hardware.between_link
    return Link(
        latency_seconds=max(inside.latency_seconds, between.latency_seconds),
        bytes_per_second=min(inside.bytes_per_second, between.bytes_per_second),
    )


def _inside(mesh: Mesh, axis: str, per_node: int) -> float:
    stride, size = mesh.axis_stride(axis), mesh.axis_size(axis)
    if per_node % (stride * size) == 0:
        return 1.0
    if stride % per_node == 0:
        return 0.0
    near = 0
    for rank in range(mesh.size):
        if mesh.coordinate(rank, axis) == 0:  # once for each group along the axis
            nodes = Counter(member // per_node for member in mesh.group(rank, [axis]))
            near += sum(count * (count - 1) for count in nodes.values())
    return near / (mesh.size * (mesh.axis_size(axis) - 1))


def meshes(hardware: Hardware, max_axes: int) -> tuple[Mesh, ...]:
    """All devices on one axis; then products of axes between nodes and axes inside them, in every factorisation (the order of
    axes with the same link changes nothing); then an inner axis of a part of a node. Few axes first."""
    if not 1 <= max_axes <= len(NAMES):
        raise ScrimpError(f"meshes of up to {max_axes} axes: give 1 to {len(NAMES)}")
    inner, outer = hardware.devices_per_node, hardware.nodes
    shapes: set[tuple[int, ...]] = {(hardware.devices,)}
    shapes |= {(*between, *inside) for between in _products(outer) for inside in _products(inner) if between or inside}
    shapes |= {(outer * (inner // part), part) for part in range(2, inner) if inner % part == 0 and outer > 1}
    few = sorted((shape for shape in shapes if len(shape) <= max_axes), key=lambda shape: (len(shape), shape))
    return tuple(Mesh(dict(zip(NAMES, shape, strict=False))) for shape in few)


def _products(number: int, least: int = 2) -> Iterator[tuple[int, ...]]:
    """All factorisations of a number, in rising order: 8 -> (2, 2, 2), (2, 4), (8); 1 -> ()."""
    if number == 1:
        yield ()
    for factor in range(least, number + 1):
        if number % factor == 0:
            for rest in _products(number // factor, factor):
                yield (factor, *rest)
