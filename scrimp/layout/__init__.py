"""What a distributed array is: a mesh of devices, and which device holds which part."""

from scrimp.layout._layout import Box, Layout, box_numel, intersect
from scrimp.layout._mesh import Mesh

__all__ = ["Box", "Layout", "Mesh", "box_numel", "intersect"]
