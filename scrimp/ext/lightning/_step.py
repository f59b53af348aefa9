"""One call of a LightningModule's method by the engine.

The engine adopts the LightningModule itself, so that names of parameters are Lightning's. It runs `model(*batch)`; for the
duration of one call `Method` lets that be `training_step`. The engine may run it more than once: an attempt that does not fit is
undone and repeated. So `self.log` counts only once, with the values of the last run, and so does what `_repeats.py` puts back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from scrimp.errors import RunError
from scrimp.ext.lightning._repeats import Counted


class NoLoss(Exception):  # noqa: N818 - no error: training_step returned None, which means that Lightning skips the batch
    """`generators`: the state of the random generators, which the engine restores as if the step had not begun."""

    def __init__(self, generators: list[torch.Tensor]) -> None:
        super().__init__()
        self.generators = generators


class Method:
    """A module's forward. While `calling` it is another method of the module, in which the module's forward is its own again."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._own = vars(module).get("forward")  # of this object; else that of its class
        self._forward: Callable[..., Any] = module.forward
        self._method: Callable[..., Any] | None = None
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._method is None:
            return self._forward(*args, **kwargs)
        outer = vars(self._module)["forward"]
        self._put(self._own)
        try:
            return self._method(*args, **kwargs)
        finally:
            self._put(outer)

    @contextmanager
    def calling(self, method: Callable[..., Any]) -> Iterator[None]:
        self._method = method
        try:
            yield
        finally:
            self._method = None

    def remove(self) -> None:
        """For a module that no engine has adopted."""
        self._put(self._own)

    def _put(self, forward: Any) -> None:
        if forward is None:
            vars(self._module).pop("forward", None)
        else:
            vars(self._module)["forward"] = forward


class Call:
    """Runs a method of the module, perhaps repeatedly, and keeps what the last run logged. `keeps`: also the dict that it
    returned."""

    def __init__(self, module: nn.Module, method: Callable[..., Any], counted: Counted, *, keeps: bool = False) -> None:
        self._module, self._method, self._counted, self._keeps = module, method, counted, keeps
        self._first = counted.now()
        self._runs, self._open = 0, False
        self._new: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._logged = self._new
        self.output: Mapping[str, Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        last = self._counted.now() if self._runs else self._first
        if self._runs:
            self._counted.back(self._first)
        self._runs, self._new, self._open = self._runs + 1, [], True
        try:
            output = self._method(*args, **kwargs)
        except NoLoss:  # a complete run too
            self._logged = self._new
            raise
        except BaseException:
            self._counted.back(last)  # a recomputation ends by an exception when backward has what it needs
            raise
        finally:
            self._open = False
        self._logged = self._new
        if self._keeps and isinstance(output, Mapping):
            weights = {weight.untyped_storage().data_ptr() for weight in self._module.parameters()}
            self.output = tree_map(partial(_freed, weights), output)
        return output

    @contextmanager
    def logging(self) -> Iterator[None]:
        """Inside, `self.log` of the module only records; afterwards it is called with what the last run recorded."""
        own = vars(self._module)
        before = own.get("log")
        own["log"] = self._record
        skipped: NoLoss | None = None
        try:
            yield
        except NoLoss as error:
            skipped = error
        finally:
            del own["log"]
            if before is not None:
                own["log"] = before
        log: Any = self._module.log
        for args, kwargs in self._logged:
            log(*args, **kwargs)
        if skipped is not None:
            raise skipped

    def _record(self, *args: Any, **kwargs: Any) -> None:
        if self._open:  # else a layer logs again, because backward recomputes it
            self._new.append(tree_map(_detached, (args, kwargs)))


def _freed(weights: set[int], leaf: Any) -> Any:
    """Without the graph, whose tensors the engine frees; a weight is cloned, because it leaves the device."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.detach().clone() if leaf.untyped_storage().data_ptr() in weights else leaf.detach()


def _detached(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def with_loss(output: Mapping[str, Any] | None, loss: torch.Tensor) -> Any:
    """What training_step returned: the engine's copy of the loss, and the rest of a dict."""
    return loss if output is None else {**output, "loss": loss}


def needs_loss(method: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """`training_step` as the engine runs it: its words for what is no loss are Lightning's."""

    def run(*args: Any, **kwargs: Any) -> Any:
        output = method(*args, **kwargs)
        if output is None:
            raise NoLoss(_generators(device))
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, torch.Tensor):
            raise RunError(
                f"training_step returned {type(output).__name__}"
                + (f" with the keys {[*output]}" if isinstance(output, Mapping) else "")
                + ": return the loss as a tensor, or a dict with the key 'loss', or None to skip the batch"
            )
        return output

    return run


def _generators(device: torch.device) -> list[torch.Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def draw_on(generators: list[torch.Tensor], device: torch.device) -> None:
    """Go on with the random numbers after those of a skipped batch."""
    torch.set_rng_state(generators[0])
    if generators[1:]:
        torch.cuda.set_rng_state(generators[1], device)
