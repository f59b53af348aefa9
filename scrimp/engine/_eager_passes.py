"""A step's forward and backward without a plan: the model itself, and autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from scrimp.engine.step.batch import loss_of, parts, to_device, which
from scrimp.engine.step.messages import check_loss
from scrimp.engine.step.out_of_module_weights import OutOfModule, OutOfModuleInBackward
from scrimp.engine.step.phase import Phase
from scrimp.engine.step.residency import Residents

if TYPE_CHECKING:
    from scrimp.engine._training import Training


class EagerPasses:
    """One of the two ways in which an engine computes gradients; `lowered/passes.py` has the other. Both have `parts`,
    `lent`, `where` and `evaluating`, and say whether a step may be tried again, has gradients here, and can be run by hand."""

    retries, trains, by_hand = True, True, ""

    def __init__(self, residents: Residents) -> None:
        self.out_of_module = OutOfModule(residents)
        self._out_of_module_again = OutOfModuleInBackward(residents)

    def parts(
        self, engine: Training, args: tuple[Any, ...], kwargs: dict[str, Any], count: int
    ) -> list[Callable[[], torch.Tensor]]:
        """The forward and backward of each micro-batch, which returns the loss."""
        return [partial(self._run, engine, part_args, part_kwargs) for part_args, part_kwargs in parts(args, kwargs, count)]

    def lent(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What of the batch the meter counts for the whole step."""
        return args, kwargs

    def where(self, error: BaseException) -> str | None:
        """Nothing beyond the layer, which the residents know."""
        return None

    @contextmanager
    def evaluating(self, engine: Training) -> Iterator[Callable[[Any], Any]]:
        """For a forward of the model. Gives a function that clones weights which leave the engine."""
        with self.out_of_module:
            yield engine.residents.kept

    def _run(self, engine: Training, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        residents = engine.residents
        engine.current.part_arrived = set()
        args, kwargs = to_device(args, kwargs, engine.device, engine.input_dtype)
        outside = self.out_of_module if self.out_of_module.found or residents.tracing else nullcontext()
        again = self._out_of_module_again if self._out_of_module_again.layers or residents.tracing else nullcontext()
        with residents.saving(), outside:  # also during backward: checkpointed parts of the model run forward again there
            function, rest = which(engine.model, args)
            out = function(*rest, **kwargs)
            loss = loss_of(engine.loss(out) if engine.loss is not None and function is engine.model else out)
            del out
            check_loss(loss, engine.model)
            value = loss.detach().clone()
            if engine.loss_scale.value != 1:
                loss = loss * engine.loss_scale.value
            if engine.micro_batches > 1 and engine.reduction == "mean":
                loss = loss / engine.micro_batches
            residents.enter(Phase.BACKWARD)
            try:
                with again:
                    loss.backward()  # type: ignore[no-untyped-call]
            finally:
                residents.enter(Phase.FORWARD)
        return value
