"""An engine's `Planning`, when it is built and when it is resized."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scrimp.chunks import Rates, Wire
from scrimp.engine.gradients.sparse import SparseExchange
from scrimp.engine.schedule.planning import Planning

if TYPE_CHECKING:
    from scrimp.engine._training import Training


def planning_of(
    engine: Training, ways: tuple[str, ...], rates: Rates, *, sparse: SparseExchange | None = None, stage: Wire | None = None
) -> Planning:
    """With no plan of a batch yet. Updates report their rates to it from now on."""
    made = Planning(
        engine.store,
        engine.recompute,
        ways,
        rates,
        engine.budget.plan_nbytes - engine.ledger.now["buffers"],
        stage_nbytes=engine.updating.stage_nbytes,
        streaming=engine.updating.streaming,
        residuals=sparse.residuals if sparse is not None else None,
        sending_nbytes=sparse.sending_nbytes() if sparse is not None else 0,
        stage=stage,
    )
    engine.updating.saw = made.saw_update
    return made
