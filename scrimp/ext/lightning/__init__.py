"""Lightning's Trainer within a memory budget: `Trainer(strategy=Budget(memory="24GiB"))`, with the LightningModule unchanged.

In:   a LightningModule with automatic optimisation, and what its Trainer is told: precision, accumulation, clipping, callbacks.
Out:  the losses, weights, hooks and logs of plain Lightning; checkpoints are folders of the engine.

    training_step ──> engine.backward ──> Lightning's hooks ──> engine.update        validation_step ──> engine.evaluate

Read in this order:

    _strategy.py   `Budget`: which call of Lightning becomes which call of the engine
    _adopted.py    the engine that has a module's weights
    _step.py       one call of a LightningModule's method, which the engine may run more than once
    _repeats.py    what a repeated step must not count twice
    _settings.py   what the Trainer and the optimizer say, as settings of the engine
    _checks.py     what would have no effect: it raises or warns
    _files.py      Lightning's own state in a checkpoint folder
    _json.py       values of Lightning's state as JSON, and back
    _ranks.py      the ranks, and collectives between them
    _package_private.py  which of Lightning's two packages, and the names of it that are not public
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scrimp._lazy import lazily

if TYPE_CHECKING:
    from scrimp.ext.lightning._strategy import Budget

__all__ = ["Budget"]

__getattr__ = lazily(__name__, {"Budget": "scrimp.ext.lightning._strategy"})
