"""Layouts: a mesh of devices, and which device holds which part of an array.

In:   text such as "[x,-]" and a `Mesh`.
Out:  a `Layout`: for each dim the mesh axes that split it, and the axes over which it is a partial sum.

    _mesh.py    `Mesh`: named axes, numbered row-major
    _layout.py  `Layout`: tiles, text form, refusals
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scrimp._lazy import lazily

if TYPE_CHECKING:
    from scrimp.layout._layout import Box, Layout, box_numel, intersect, merge_axes
    from scrimp.layout._mesh import AXIS_NAME, Mesh, prime_factors

__all__ = ["AXIS_NAME", "Box", "Layout", "Mesh", "box_numel", "intersect", "merge_axes", "prime_factors"]

__getattr__ = lazily(
    __name__,
    {
        "Box": "scrimp.layout._layout",
        "Layout": "scrimp.layout._layout",
        "box_numel": "scrimp.layout._layout",
        "intersect": "scrimp.layout._layout",
        "merge_axes": "scrimp.layout._layout",
        "AXIS_NAME": "scrimp.layout._mesh",
        "Mesh": "scrimp.layout._mesh",
        "prime_factors": "scrimp.layout._mesh",
    },
)
