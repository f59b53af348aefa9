"""The training step: fetch, forward, backward, update, release, layer by layer, within a device budget."""

from scrimp.engine._engine import Engine
from scrimp.engine._memory import Memory

__all__ = ["Engine", "Memory"]
