"""scrimp trains PyTorch models in the least memory a cluster allows, and says beforehand how much that is.

Names are resolved when first used, so that `import scrimp` loads neither torch nor numpy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scrimp.chunks._optim import SGD as SGD
    from scrimp.chunks._optim import AdamW as AdamW
    from scrimp.cluster import Cluster as Cluster
    from scrimp.cluster import Link as Link
    from scrimp.engine import Engine as Engine
    from scrimp.engine import Memory as Memory
    from scrimp.engine._cross_entropy import chunked_cross_entropy as chunked_cross_entropy
    from scrimp.engine._metrics import read_metrics as read_metrics
    from scrimp.engine._progress import Progress as Progress
    from scrimp.errors import CaptureError as CaptureError
    from scrimp.errors import CheckpointError as CheckpointError
    from scrimp.errors import FitError as FitError
    from scrimp.errors import LayoutError as LayoutError
    from scrimp.errors import MoveError as MoveError
    from scrimp.errors import PlanError as PlanError
    from scrimp.errors import PlanWarning as PlanWarning
    from scrimp.errors import RunError as RunError
    from scrimp.errors import ScrimpError as ScrimpError
    from scrimp.exchange import Dense as Dense
    from scrimp.exchange import Sparse as Sparse
    from scrimp.ext.dtensor import redistribute as redistribute
    from scrimp.layout import Layout as Layout
    from scrimp.layout import Mesh as Mesh
    from scrimp.move import Program as Program
    from scrimp.move import synthesize as synthesize
    from scrimp.move.many import redistribute_many as redistribute_many
    from scrimp.planner._plan import Plan as Plan
    from scrimp.planner.api import plan as plan

__version__ = "0.1.0.dev0"

_HOME = {
    "AdamW": "scrimp.chunks._optim",
    "CaptureError": "scrimp.errors",
    "CheckpointError": "scrimp.errors",
    "Cluster": "scrimp.cluster",
    "Dense": "scrimp.exchange",
    "Engine": "scrimp.engine",
    "FitError": "scrimp.errors",
    "Layout": "scrimp.layout",
    "LayoutError": "scrimp.errors",
    "Link": "scrimp.cluster",
    "Memory": "scrimp.engine",
    "Mesh": "scrimp.layout",
    "MoveError": "scrimp.errors",
    "Plan": "scrimp.planner._plan",
    "PlanError": "scrimp.errors",
    "PlanWarning": "scrimp.errors",
    "Program": "scrimp.move",
    "Progress": "scrimp.engine._progress",
    "RunError": "scrimp.errors",
    "SGD": "scrimp.chunks._optim",
    "ScrimpError": "scrimp.errors",
    "Sparse": "scrimp.exchange",
    "chunked_cross_entropy": "scrimp.engine._cross_entropy",
    "read_metrics": "scrimp.engine._metrics",
    "redistribute": "scrimp.ext.dtensor",
    "plan": "scrimp.planner.api",
    "redistribute_many": "scrimp.move.many",
    "synthesize": "scrimp.move",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'scrimp' has no attribute '{name}'")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
