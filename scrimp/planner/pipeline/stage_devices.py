"""Assigns devices to pipeline stages: equal consecutive parts of the cluster, so that stage boundaries fall on the slow links."""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from scrimp.cluster import Cluster, Link
from scrimp.errors import PlanError
from scrimp.layout import Mesh


def stage_cluster(cluster: Cluster, stages: int) -> tuple[Cluster, tuple[Link, ...]]:
    """The cluster of one stage, and the links from each stage to the next, from the last to the first. Where stages share nodes
    unevenly, the stage's cluster has nodes as small as the smallest part of a node."""
    hardware = cluster.hardware
    if hardware is None:
        raise PlanError("this cluster has no device data: stages need Cluster.preset('8xH100') or Cluster.load(file)")
    devices, per_node = hardware.devices, hardware.devices_per_node
    if devices % stages:
        fitting = ", ".join(str(each) for each in range(1, devices + 1) if devices % each == 0)
        raise PlanError(f"stages={stages}: the cluster has {devices} devices, which do not divide equally: use {fitting}")
    count = devices // stages
    inside = gcd(count, per_node)
    part = replace(hardware, nodes=count // inside, devices_per_node=inside)
    default = part.inside_link if part.nodes == 1 else part.between_link
    links = []
    for stage in range(stages):
        here, there = stage * count, (stage + 1) % stages * count
        near = all((here + k) // per_node == (there + k) // per_node for k in range(count))
        links.append(hardware.inside_link if near else hardware.between_link)
    return replace(cluster, hardware=part, default=default), tuple(links)


def whole_mesh(cluster: Cluster, mesh: Mesh | str, where: str = "the cluster") -> Mesh:
    """A mesh over all of the cluster's devices; raises `PlanError` for a smaller or larger one."""
    mesh = Mesh.parse(mesh) if isinstance(mesh, str) else mesh
    cluster.axis_links(mesh)  # raises if it is too large
    devices = mesh.size if cluster.hardware is None else cluster.hardware.devices
    if mesh.size < devices:
        every = f"{mesh.names[0]}={devices}" if len(mesh.axes) == 1 else f"axes whose product is {devices}"
        raise PlanError(
            f"the mesh {mesh} has {mesh.size} devices, and {where} {devices}: the other {devices - mesh.size} would be idle. "
            f"Give a mesh of all of them ({every}), or plan for {where} of {mesh.size} devices"
        )
    return mesh
