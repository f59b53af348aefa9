"""The update on a device by one Triton kernel (`triton_update.py`): 28 bytes of traffic per parameter, 16.25 with 8-bit states,
and no scratch for gradients or for coding.

It is used if Triton is installed, if it compiles, and if a trial comes within one ulp of torch's fused kernels. Otherwise torch's
kernels run tile by tile. int8 codes are rounded stochastically: equal moments have equal codes, but an ulp of a moment, or of its
block's scale, may change one code in some hundred thousand. The trial also compiles all variants that the engine needs, before
any step. After that nothing here waits for the device: values that change from step to step are passed as arguments, or computed
on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch

from scrimp.chunks.kernels.fallback import kernel_or_reason, triton_at_hand
from scrimp.chunks.store.placement import Piece
from scrimp.chunks.tables import state_codec
from scrimp.chunks.tables.optimizers import SGD, AdamW, Optimizer
from scrimp.chunks.tables.state_codec import Coder, coder_numel, seed, state_fields
from scrimp.chunks.update import torch_fused_private

BLOCK, WARPS = 1024, 8  # four numbers a thread: 16 bytes of fp32
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_KNOWN = 256
TRIED = 2 * BLOCK + 5  # whole blocks and a remainder
MOST_OTHER = 1 / 512  # share of codes that an ulp may change in a trial; with other random bits half of them would differ


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A variant that is compiled separately: optimizer, and dtype of weights and gradients; an fp32 weight is its own master."""

    dtype: torch.dtype
    adamw: bool
    buffered: bool = False
    nesterov: bool = False
    coded: bool = False


def update_kinds(optimizers: Iterable[Optimizer], dtypes: Iterable[torch.dtype]) -> frozenset[Kind]:
    def kind(o: Optimizer, dtype: torch.dtype) -> Kind:
        if isinstance(o, AdamW):
            return Kind(dtype=dtype, adamw=True, coded=o.state != "fp32")
        return Kind(dtype=dtype, adamw=False, buffered=bool(o.momentum), nesterov=bool(o.momentum) and o.nesterov)

    chosen = list(optimizers)
    return frozenset(kind(optimizer, dtype) for dtype in {*dtypes} for optimizer in chosen)


@dataclass(frozen=True)
class Fused:
    """Updates pieces on one device. `scale` is a scalar on that device. Weight and gradient may share memory."""

    kernels: Any
    _known: dict[object, tuple[int, torch.Tensor]] = field(default_factory=dict)

    def apply(
        self, optimizer: Optimizer, lr: float, count: int, piece: Piece, weight: torch.Tensor | None, scale: torch.Tensor | None
    ) -> None:
        """`count`: number of updates of the parameter, this one included."""
        _check(optimizer, piece, weight, scale)
        numel, device = piece.master.numel(), piece.master.device
        if not numel:
            return
        here = (device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)
        factor = self._number(here, 1, lambda: _fp32(1, device)) if scale is None else scale
        target, grid = piece.master if weight is None else weight, (-(-numel // BLOCK),)
        options = {"own_master": weight is None, "block": BLOCK, "num_warps": WARPS, "enable_fp_fusion": False}
        with torch.cuda.device_of(piece.master):  # type: ignore[no-untyped-call]
            if isinstance(optimizer, AdamW):
                betas = optimizer.betas
                known = self._number((*here, betas), count, lambda: _corrections(betas, count, device))
                tensors = (piece.master, *piece.states, piece.gradient, target, factor, known)
                numbers = [*map(float, (lr, *betas, optimizer.eps, optimizer.weight_decay))]
                if optimizer.state == "fp32":
                    self.kernels.adamw[grid](*tensors, numel, *numbers, **options)
                    return
                start = seed(piece.inside.start, count)
                self.kernels.adamw_coded[grid](*tensors, numel, start, *numbers, coded=state_codec.BLOCK, **options)
                return
            momentum, buffered = optimizer.momentum, optimizer.momentum != 0
            carry, take = (0, 1) if count == 1 else (momentum, 1 - optimizer.dampening)
            self.kernels.sgd[grid](
                piece.master, piece.states[0] if buffered else piece.master, piece.gradient, target, factor, numel,
                *map(float, (lr, momentum, carry, take, optimizer.weight_decay)),
                buffered=buffered, nesterov=buffered and optimizer.nesterov, **options,
            )  # fmt: skip

    def _number(self, key: object, count: int, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Cached for all parameters with the same update count; computed on the stream that reads it."""
        found = self._known.get(key)
        if found is None or found[0] != count:
            if len(self._known) >= MOST_KNOWN:  # a scheduler may change betas in every step
                self._known.clear()
            found = self._known[key] = (count, make())
        return found[1]


def _corrections(betas: tuple[float, float], count: int, device: torch.device) -> torch.Tensor:
    """AdamW's two bias corrections as torch's kernel computes them: in fp32, by the device's own power function, whose error
    is amplified by the difference from 1 in the first steps."""
    powers = [torch.pow(_fp32(beta, device), _fp32(count, device)) for beta in betas]
    return torch.stack([1 - powers[0], (1 - powers[1]).sqrt()])


def _fp32(value: float, device: torch.device) -> torch.Tensor:
    return torch.full((), float(value), dtype=torch.float32, device=device)  # filled on the device, without a copy


def _check(optimizer: Optimizer, piece: Piece, weight: torch.Tensor | None, scale: torch.Tensor | None) -> None:
    numel, device = piece.master.numel(), piece.master.device
    kept = state_fields(len(piece.states), "fp32") if optimizer.state == "fp32" else optimizer.fields  # a group may use none
    narrow = [piece.gradient, *([] if weight is None else [weight])]
    fp32 = [piece.master, *([] if scale is None else [scale])]
    if (
        any(tensor.dtype != torch.float32 for tensor in fp32)
        or any(tensor.dtype not in DTYPES or tensor.numel() != numel for tensor in narrow)
        or [(s.dtype, s.numel()) for s in piece.states] != [(field.dtype, field.numel(numel)) for field in kept]
        or any(not tensor.is_contiguous() or tensor.device != device for tensor in (*fp32, *narrow, *piece.states))
        or (scale is not None and scale.numel() != 1)
    ):
        raise ValueError(
            "the device's kernel is for contiguous tensors of one size on one device: fp32 but gradient and weight, and states "
            "as the optimizer keeps them"
        )


def device_kernel(device: torch.device, wanted: frozenset[Kind]) -> Fused | None:
    """The kernel, after a trial of all wanted variants; `why_no_device_kernel` says why there is none."""
    found = _settled(device, wanted)
    return found if isinstance(found, Fused) else None


def why_no_device_kernel(device: torch.device, wanted: frozenset[Kind]) -> str | None:
    found = _settled(device, wanted)
    return found if isinstance(found, str) else None


@cache
def _settled(device: torch.device, wanted: frozenset[Kind]) -> Fused | str:
    return kernel_or_reason("SCRIMP_FUSED", partial(_made, device, wanted))


def _made(device: torch.device, wanted: frozenset[Kind]) -> Fused | str:
    if device.type != "cuda":
        return "it is for CUDA devices"
    with triton_at_hand():
        kernel = Fused(_kernels())
        wrong = [kind for kind in wanted if not _tried(kernel, device, kind)]
    return f"it is not within one ulp of torch {torch.__version__} for {wrong[0]}" if wrong else kernel


def _kernels() -> Any:
    from scrimp.chunks.kernels import triton_update

    return triton_update


def _tried(kernel: Fused, device: torch.device, kind: Kind) -> bool:
    """Whether two updates come within one ulp of torch's, and codes match `tables/state_codec.py`."""
    optimizer: Optimizer = AdamW(weight_decay=0.1, state="int8" if kind.coded else "fp32")
    if not kind.adamw:
        optimizer = SGD(weight_decay=0.1, momentum=0.9 * kind.buffered, dampening=0.0, nesterov=kind.nesterov)
    random = torch.Generator().manual_seed(0)
    drawn = [torch.randn(TRIED, generator=random, dtype=torch.float32, device="cpu") for _ in range(4)]
    master, *states, gradient = [values.to(device) for values in (drawn[0], drawn[1], drawn[2].square(), drawn[3])]
    states, gradient = states[: optimizer.states], gradient.to(kind.dtype)
    own, span = kind.dtype == torch.float32, slice(0, TRIED)
    coder = Coder(torch.empty(coder_numel(TRIED), dtype=torch.float32, device=device))
    if kind.coded:
        for row, values in zip(coder.moments(span), states, strict=True):
            row.copy_(values)
        states = [torch.empty(field.numel(TRIED), dtype=field.dtype, device=device) for field in optimizer.fields]
        coder.encode(states, span, place=0, count=0)
    for count in (1, 3):
        weight = None if own else gradient.clone()
        piece = Piece(
            inside=span,
            weight=master if weight is None else weight,
            gradient=gradient if weight is None else weight,
            master=master.clone(),
            states=[state.clone() for state in states],
        )
        kernel.apply(optimizer, 0.01, count, piece, weight, None)
        moments = coder.decode(states, span) if kind.coded else states
        torch_fused_private.update(optimizer, 0.01, count, master, gradient.float(), moments)
        if kind.coded:
            coder.encode(states, span, place=0, count=count)
        pairs = zip((piece.master, *piece.states), (master, *states), strict=True)
        if not all((within_an_ulp if mine.is_floating_point() else nearly_all)(mine, other) for mine, other in pairs):
            return False
        if weight is not None and not torch.equal(weight, piece.master.to(kind.dtype)):
            return False
    return True


def within_an_ulp(mine: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether fp32 tensors are equal, or differ by one ulp."""
    towards = torch.nextafter(other, mine)
    return bool(((mine == towards) | (mine.isnan() & other.isnan())).all())


def nearly_all(mine: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether codes are equal, except for a few that differ by one."""
    difference = (mine.int() - other.int()).abs()
    return bool((difference <= 1).all()) and bool(difference.sum() <= MOST_OTHER * difference.numel())
