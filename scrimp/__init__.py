"""scrimp trains PyTorch models in little memory, and predicts the peak before training.

Names are resolved when first used, so that `import scrimp` loads neither torch nor numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from scrimp._lazy import lazily
from scrimp._version import __version__ as __version__

if TYPE_CHECKING:
    from scrimp.chunks import SGD as SGD
    from scrimp.chunks import AdamW as AdamW
    from scrimp.cluster import Cluster as Cluster
    from scrimp.cluster import Link as Link
    from scrimp.engine import Engine as Engine
    from scrimp.engine import Memory as Memory
    from scrimp.engine import Progress as Progress
    from scrimp.engine import chunked_cross_entropy as chunked_cross_entropy
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
    from scrimp.move import redistribute_many as redistribute_many
    from scrimp.move import synthesize as synthesize
    from scrimp.planner import Plan as Plan
    from scrimp.planner import plan as plan
    from scrimp.report import read_metrics as read_metrics


_HOME = {
    "AdamW": "scrimp.chunks",
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
    "Plan": "scrimp.planner",
    "PlanError": "scrimp.errors",
    "PlanWarning": "scrimp.errors",
    "Program": "scrimp.move",
    "Progress": "scrimp.engine",
    "RunError": "scrimp.errors",
    "SGD": "scrimp.chunks",
    "ScrimpError": "scrimp.errors",
    "Sparse": "scrimp.exchange",
    "chunked_cross_entropy": "scrimp.engine",
    "read_metrics": "scrimp.report",
    "redistribute": "scrimp.ext.dtensor",
    "plan": "scrimp.planner",
    "redistribute_many": "scrimp.move",
    "synthesize": "scrimp.move",
}

__all__ = sorted(_HOME)


_resolve = lazily(__name__, _HOME)


def __getattr__(name: str) -> Any:
    """A public name; or the package of reports, which users call as `scrimp.report.write`."""
    return import_module("scrimp.report") if name == "report" else _resolve(name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
