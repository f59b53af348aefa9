"""What the machines are: the links along each mesh axis, and what one machine was measured to do."""

from scrimp.cluster._cluster import Cluster, Link
from scrimp.cluster._machine import Machine

__all__ = ["Cluster", "Link", "Machine"]
