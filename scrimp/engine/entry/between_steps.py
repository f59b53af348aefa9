"""Engine methods between steps: learning rates, evaluation, parameters by name, checkpoints. `Engine` documents them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from scrimp.engine.entry.checkpoints import iter_state, load_state, save_state
from scrimp.engine.entry.evaluate import evaluate
from scrimp.engine.entry.full_parameters import full_parameters
from scrimp.engine.entry.rank_calls import begin_call, naming_calls
from scrimp.engine.entry.resize import resize
from scrimp.engine.entry.saves import Saves
from scrimp.engine.observe.bound import Bound, bound
from scrimp.engine.observe.record import report
from scrimp.engine.setup.process_groups import Group
from scrimp.engine.step.interrupts import Interrupts, in_one_piece
from scrimp.errors import RunError

if TYPE_CHECKING:
    from scrimp.engine._training import Training
    from scrimp.engine.lowered.dtensors import DTensors


class Between:
    """Mixin of `Training`. `Engine` documents each call."""

    interrupts: Interrupts

    @cached_property
    def saves(self) -> Saves:
        """The save in the background."""
        return Saves()

    @property
    def _whole(self) -> Training:
        return cast("Training", self)

    @property
    def lr(self) -> float | list[float]:
        self._whole.optimizer.told(self._whole.steps)
        rates = self._whole.optimizer.rates
        return rates[0] if len(rates) == 1 else rates

    @lr.setter
    def lr(self, values: float | Sequence[float]) -> None:
        self._whole.optimizer.set_rates(values)

    @in_one_piece
    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        begin_call(self._whole, "evaluate")
        self._whole.check_usable()
        with naming_calls(self._whole):
            return evaluate(self._whole, args, kwargs)

    def full_parameters(self, *names: str) -> AbstractContextManager[nn.Module]:
        return full_parameters(self._whole, names)

    def bound(self) -> Bound:
        return bound(self._whole)

    def report(self, path: str | Path, rehearsal: str | Path | Mapping[str, Any] | None) -> None:
        report(self._whole, path, rehearsal)

    def state_dict(self, *names: str) -> dict[str, torch.Tensor]:
        begin_call(self._whole, "state_dict")
        state = {}
        for name, tensor in iter_state(self._whole, names):
            if self._whole.wire.rank == 0:
                state[name] = tensor
        return state

    def dtensors(self) -> DTensors:
        from scrimp.engine.lowered.dtensors import dtensors  # loads DTensor, which nothing else needs

        begin_call(self._whole, "dtensors")
        with naming_calls(self._whole):
            return dtensors(self._whole)

    def iter_state(self, *names: str) -> Iterator[tuple[str, torch.Tensor]]:
        begin_call(self._whole, "iter_state")
        yield from iter_state(self._whole, names)

    def save(self, folder: str | Path, extra: Mapping[str, Any] | None, wait: bool) -> None:
        begin_call(self._whole, "save")
        save_state(self._whole, folder, extra, wait=wait)

    def load(self, folder: str | Path) -> dict[str, Any]:
        begin_call(self._whole, "load")
        return load_state(self._whole, folder)

    @in_one_piece
    def resize(self, group: Group) -> None:
        resize(self._whole, group)

    def check_open(self) -> None:
        if self._whole.closed:
            raise RunError(
                "the engine is closed: only its state can be read (state_dict, iter_state, save); build a new Engine to go on"
            )

    @in_one_piece
    def close(self) -> None:
        engine = self._whole
        if engine.closed:
            return
        if engine.pending:
            engine.discard()
        engine.closed = True
        if engine.group.outside:
            return
        engine.residents.abandon()
        try:
            engine.saves.finish()
        finally:
            with suppress(RunError):  # an error of a background thread is raised again by whoever reads the state
                engine.planning.placements_back(for_good=True)
                engine.wait()
            engine.exchanging.close()
            engine.updating.end()
            engine.meter.close()
