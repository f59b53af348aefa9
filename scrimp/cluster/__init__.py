"""What the machines are: the links along each mesh axis, what a cluster is built of, and what one machine was measured to do."""

from scrimp.cluster._cluster import Cluster
from scrimp.cluster._hardware import Hardware, Shares
from scrimp.cluster._link import Link
from scrimp.cluster._machine import Machine
from scrimp.cluster._meshes import AxisLink

__all__ = ["AxisLink", "Cluster", "Hardware", "Link", "Machine", "Shares"]
