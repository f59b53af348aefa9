"""Engine methods between steps: learning rates, evaluation, parameters by name, checkpoints. `Engine` documents them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from scrimp.engine.entry.checkpoints import iter_state, load_state, save_state
from scrimp.engine.entry.evaluate import evaluate
from scrimp.engine.entry.full_parameters import full_parameters
from scrimp.engine.entry.rank_calls import begin_call, naming_calls
from scrimp.engine.observe.bound import Bound, bound
from scrimp.engine.step.interrupts import Interrupts, in_one_piece
from scrimp.errors import RunError

if TYPE_CHECKING:
    from scrimp.engine._training import Training


class Between:
    """Mixin of `Training`."""

    interrupts: Interrupts

    @property
    def _whole(self) -> Training:
        return cast("Training", self)

    @property
    def lr(self) -> float | list[float]:
        """The learning rate of the next update; with several groups a list, in the order of `engine.optimizer.param_groups`.
        Setting it sets all groups, to one number or each to its own. An update that was submitted keeps the rate it had."""
        self._whole.optimizer.told(self._whole.steps)
        rates = self._whole.optimizer.rates
        return rates[0] if len(rates) == 1 else rates

    @lr.setter
    def lr(self, values: float | Sequence[float]) -> None:
        self._whole.optimizer.set_rates(values)

    @in_one_piece
    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Forward without gradients in eval mode, within the budget: `engine.evaluate(*batch)` calls the model.
        `engine.evaluate(fn, *args, **kwargs)` calls fn(*args, **kwargs), which may use the model in any way, with tensors
        moved to the device: `engine.evaluate(model.generate, ids, max_new_tokens=20)`. A function that does not fit may be
        called a second time, after layers have left the device. On several ranks all must run the same layers in the same
        order (`synced_gpus=True` for generate)."""
        begin_call(self._whole, "evaluate")
        self._whole.check_usable()
        with naming_calls(self._whole):
            return evaluate(self._whole, args, kwargs)

    def full_parameters(self, *names: str) -> AbstractContextManager[nn.Module]:
        """`with engine.full_parameters() as model:` puts fp32 masters on the host into the model, to read and edit. At the end
        of the block the engine writes what changed to master and weight. `names` are patterns such as "head.*": the others
        stay out. With several ranks every rank enters, and makes the same edits."""
        return full_parameters(self._whole, names)

    def bound(self) -> Bound:
        """The least traffic and time of a step like the last one, and what it took. The first call measures the machine."""
        return bound(self._whole)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All parameters in fp32 and all buffers, on the CPU; with several ranks on rank 0, and nothing on the others."""
        begin_call(self._whole, "state_dict")
        state = {}
        for name, tensor in iter_state(self._whole):
            if self._whole.wire.rank == 0:
                state[name] = tensor
        return state

    def iter_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter in fp32 by every name it has, and every buffer; every rank gets all of them, one at a time."""
        begin_call(self._whole, "iter_state")
        yield from iter_state(self._whole)

    def save(self, folder: str | Path) -> None:
        """Write a checkpoint: weights, masters, states, step, random state, learning rates and the other settings of the
        optimizer's groups; complete or not there at all. The state of a scheduler is yours: `scheduler.state_dict()`."""
        begin_call(self._whole, "save")
        save_state(self._whole, folder)

    def load(self, folder: str | Path) -> None:
        """Go on from a checkpoint, whatever budget, chunk size and number of ranks it was written with. Learning rates are
        those of the checkpoint, as with `load_state_dict` of torch's optimizers, unless `lr` is a function; set `engine.lr`
        afterwards for others."""
        begin_call(self._whole, "load")
        load_state(self._whole, folder)

    def check_open(self) -> None:
        if self._whole.closed:
            raise RunError(
                "the engine is closed: only its state can be read (state_dict, iter_state, save); build a new Engine to go on"
            )

    @in_one_piece
    def close(self) -> None:
        """End training for good: the engine frees the device, lifts the cap on the allocator and ends its threads. The host keeps
        the state, as far as there is room for it, and it can still be read and saved. Gradients of `engine.backward` that wait
        for an update are discarded. A second call does nothing."""
        engine = self._whole
        if engine.closed:
            return
        if engine.pending:
            engine.discard()
        engine.closed = True
        engine.residents.abandon()
        with suppress(RunError):  # an error of a background thread is raised again by whoever reads the state
            engine.planning.placements_back(for_good=True)
            engine.wait()
        engine.exchanging.close()
        engine.updating.end()
        engine.meter.close()

    def __enter__(self) -> Training:
        self.check_open()
        return self._whole

    def __exit__(self, *_error: object) -> None:
        self.close()
