"""torch's dispatch modes, by private names: disabled for a while, and without torch's check that keeps its compiler out.

torch makes that check for every operator. A mode that only counts does not need it, because nothing is compiled under a mode.
Where the private name is missing, modes are removed and restored, which takes longer.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack

_GUARD: Any = getattr(torch._C, "_DisableTorchDispatch", None)
AVAILABLE = _GUARD is not None


class PlainMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode without the compiler check. However its `with` block ends, it leaves torch's stack."""

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)  # type: ignore[no-untyped-call]
        finally:
            take_off(self)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def take_off(mode: TorchDispatchMode) -> None:
    """Removes a mode from torch's stack, if an exception in torch's own exit has left it there."""
    stack = _get_current_dispatch_mode_stack()
    if not any(other is mode for other in stack):
        return
    for _ in stack:
        torch._C._pop_torch_dispatch_stack(None)
    for other in stack:
        if other is not mode:
            torch._C._push_on_torch_dispatch_stack(other)


class Unseen:
    """Operators inside are invisible to all modes of this thread, and to autograd."""

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        if AVAILABLE:
            self._guard = _GUARD()  # in effect as long as the object lives
        else:
            self._guard = _disable_current_modes()
            self._guard.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not AVAILABLE:
            self._guard.__exit__(kind, error, trace)
        self._guard = None
        torch._C._set_grad_enabled(self._before)


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its graph; no mode sees this."""
    if not AVAILABLE:
        return tensor.detach()
    guard = _GUARD()
    try:
        return tensor.detach()
    finally:
        del guard
