"""While the model runs: its weights are in it, and what it makes of a batch is metered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from scrimp.engine._modules import refuse_compiled
from scrimp.errors import FitError

if TYPE_CHECKING:
    from scrimp.engine._engine import Engine


@contextmanager
def running(engine: Engine, args: Any, kwargs: Any, metered: AbstractContextManager[object]) -> Iterator[None]:
    refuse_compiled(engine.model)
    batch = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    with engine.stand_ins.away(), metered:
        engine.residents.active = True
        for tensor in batch:
            engine.meter.lend(tensor)
        try:
            yield
        except torch.cuda.OutOfMemoryError as error:
            words = f"step {engine.steps}: {error}; the ledger has {engine.ledger.snapshot()}"
            raise FitError(words, tier="device") from error
        finally:
            engine.residents.active = False
            for tensor in batch:
                engine.meter.forget(tensor)
