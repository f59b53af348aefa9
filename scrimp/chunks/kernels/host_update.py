"""The update on the host by a small C kernel (`kernels/host_update.c`): one pass over memory, with its own threads and without
the GIL.

It is used if it can be built and if a trial has the bits of torch's own kernels; otherwise torch's kernels run. On x86-64
torch's instruction set determines the form of the kernel, on aarch64 the trial finds it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from scrimp.chunks.kernels.build import load_library
from scrimp.chunks.kernels.fallback import kernel_or_reason
from scrimp.chunks.kernels.host_forms import FORMS, form_of
from scrimp.chunks.kernels.host_trial import trial
from scrimp.chunks.tables.state_codec import seed, state_fields

KINDS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
LEVELS = ("no vectors", "AVX2", "AVX-512", "compiled C, with fused multiply-adds")
FUSED = 3  # the level of aarch64
_CAPABILITIES = {"DEFAULT": 0, "AVX2": 1}  # torch's, because its bits are wanted; all others mean AVX-512

_POINTER, _INT, _DOUBLE = ctypes.c_void_p, ctypes.c_int, ctypes.c_double
_ENDS: tuple[Any, ...] = (_POINTER, _INT, _POINTER, _INT, ctypes.c_int64)
_ADAMW = (*[_POINTER] * 3, *_ENDS, *[_DOUBLE] * 7, *[_INT] * 2)
_CODED = (*[_POINTER] * 5, *_ENDS, *[_DOUBLE] * 7, ctypes.c_uint32, *[_INT] * 2)
_SGD = (*[_POINTER] * 2, *_ENDS, *[_DOUBLE] * 5, *[_INT] * 4)


@dataclass(frozen=True)
class Native:
    """`level` is the instruction set, an index of LEVELS, or the level of a `Form`. Tensors are flat, contiguous and on the
    CPU; masters and states are fp32. The gradient is multiplied by `scale`. The weight is written from the master, if one
    is given; it may be the gradient's own memory."""

    library: ctypes.CDLL
    compiler: str
    level: int

    @property
    def instructions(self) -> str:
        form = form_of(self.level)
        return LEVELS[self.level] if form is None else str(form)

    def describe(self) -> str:
        return f"{self.instructions}, built by {self.compiler}"

    def adamw(
        self,
        master: torch.Tensor,
        m: torch.Tensor,
        v: torch.Tensor,
        gradient: torch.Tensor,
        weight: torch.Tensor | None,
        scale: float | None,
        *,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        count: int,
        threads: int,
    ) -> None:
        """`count`: number of updates of the parameter, this one included."""
        _check(master, (m, v), gradient, weight)
        self.library.scrimp_adamw(
            master.data_ptr(), m.data_ptr(), v.data_ptr(), *_ends(gradient, weight),
            1.0 if scale is None else scale, lr, beta1, beta2, eps, weight_decay, count, self.level, threads,
        )  # fmt: skip

    def adamw_coded(
        self,
        master: torch.Tensor,
        states: Sequence[torch.Tensor],
        gradient: torch.Tensor,
        weight: torch.Tensor | None,
        scale: float | None,
        *,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        count: int,
        place: int,
        threads: int,
    ) -> None:
        """The same with 8-bit moments (`tables/state_codec.py`); `place`: index of the first element in its parameter."""
        if not takes_coded(master, states, gradient, weight):
            raise ValueError("the native kernel is for contiguous CPU tensors of one size, with codes and scales as states")
        self.library.scrimp_adamw_coded(
            master.data_ptr(), *(state.data_ptr() for state in states), *_ends(gradient, weight),
            1.0 if scale is None else scale, lr, beta1, beta2, eps, weight_decay, count, seed(place, count), self.level, threads,
        )  # fmt: skip

    def sgd(
        self,
        master: torch.Tensor,
        buffer: torch.Tensor | None,
        gradient: torch.Tensor,
        weight: torch.Tensor | None,
        scale: float | None,
        *,
        lr: float,
        momentum: float,
        dampening: float,
        weight_decay: float,
        nesterov: bool,
        count: int,
        threads: int,
    ) -> None:
        """Without momentum the buffer is not touched."""
        if buffer is None and momentum != 0:
            raise ValueError(f"momentum is {momentum}, and there is no buffer for it")
        _check(master, () if buffer is None else (buffer,), gradient, weight)
        self.library.scrimp_sgd(
            master.data_ptr(), None if buffer is None else buffer.data_ptr(), *_ends(gradient, weight),
            1.0 if scale is None else scale, lr, momentum, dampening, weight_decay, nesterov, count == 1, self.level, threads,
        )  # fmt: skip


def takes(master: torch.Tensor, states: Sequence[torch.Tensor], gradient: torch.Tensor, weight: torch.Tensor | None) -> bool:
    """Whether the kernel accepts these tensors."""
    fp32 = (master, *states)
    other = (gradient,) if weight is None else (gradient, weight)
    return (
        all(tensor.dtype == torch.float32 for tensor in fp32)
        and gradient.dtype in KINDS
        and (weight is None or weight.dtype in (torch.bfloat16, torch.float16))
        and all(t.is_cpu and t.is_contiguous() and t.numel() == master.numel() for t in (*fp32, *other))
    )


def takes_coded(
    master: torch.Tensor, states: Sequence[torch.Tensor], gradient: torch.Tensor, weight: torch.Tensor | None
) -> bool:
    kept = state_fields(2, "int8")
    return (
        takes(master, (), gradient, weight)
        and len(states) == len(kept)
        and all(
            state.is_cpu and state.is_contiguous() and (state.dtype, state.numel()) == (field.dtype, field.numel(master.numel()))
            for state, field in zip(states, kept, strict=True)
        )
    )


def _check(
    master: torch.Tensor, states: Sequence[torch.Tensor], gradient: torch.Tensor, weight: torch.Tensor | None
) -> None:  # the kernel would write out of bounds otherwise
    if not takes(master, states, gradient, weight):
        raise ValueError("the native kernel is for contiguous CPU tensors of one size: fp32, with a 16-bit weight or none")


def _ends(gradient: torch.Tensor, weight: torch.Tensor | None) -> tuple[int, int, int | None, int, int]:
    kept = (None, 0) if weight is None else (weight.data_ptr(), KINDS[weight.dtype])
    return gradient.data_ptr(), KINDS[gradient.dtype], *kept, gradient.numel()


def host_kernel() -> Native | None:
    """The kernel, built if necessary. The first call decides for the process; `why_no_host_kernel` says why there is none."""
    found = _settled()
    return found if isinstance(found, Native) else None


def why_no_host_kernel() -> str | None:
    found = _settled()
    return found if isinstance(found, str) else None


@cache
def _settled() -> Native | str:
    return kernel_or_reason("SCRIMP_NATIVE", _made)


def _made() -> Native | str:
    library, compiler = load_library()
    library.scrimp_adamw.argtypes, library.scrimp_adamw.restype = _ADAMW, None
    library.scrimp_adamw_coded.argtypes, library.scrimp_adamw_coded.restype = _CODED, None
    library.scrimp_sgd.argtypes, library.scrimp_sgd.restype = _SGD, None
    attempt = trial()
    for level in _levels(library.scrimp_level()):
        kernel = Native(library, compiler, level)
        if attempt.passed_by(kernel):
            return kernel
    return f"its bits are not those of torch {torch.__version__}"


def _levels(most: int) -> list[int]:
    """Levels that can have torch's bits on a machine that supports `most`."""
    if most == FUSED:
        return [form.level for form in FORMS]
    return [min(most, _CAPABILITIES.get(torch.backends.cpu.get_cpu_capability(), 2))]
