"""What the machines are: so far the links along each mesh axis; devices and memories come with the planner."""

from scrimp.cluster._cluster import Cluster, Link

__all__ = ["Cluster", "Link"]
