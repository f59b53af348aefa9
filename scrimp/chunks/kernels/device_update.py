"""The device's update by one Triton kernel (`triton_update.py`): 28 bytes per parameter, 16.25 with states of 8 bits, and no
stage for gradients or for coding.

It is used where Triton is, where it compiles, and where a trial comes within one ulp of torch's own fused kernels; torch's
are used otherwise, tile by tile. Codes are rounded at random: equal moments have equal codes, but an ulp of a moment, or of
its block's scale, may turn one in some hundred thousand. The trial also compiles what the engine will ask for, before any
step. Nothing here waits for the device once that is done: what changes from step to step goes as arguments, or is computed
there.
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
TRIED = 2 * BLOCK + 5  # whole blocks and a rest
MOST_OTHER = 1 / 512  # of the codes that an ulp may turn, in a trial; with other random bits half of them would differ


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What is compiled apart: the optimizer, and of what type weights and gradients are; in fp32 a weight is its master."""

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
    """Updates pieces on one device. `scale` is a number on that device; the weight may be the gradient's own memory."""

    kernels: Any
    _known: dict[object, tuple[int, torch.Tensor]] = field(default_factory=dict)

    def apply(
        self, optimizer: Optimizer, lr: float, count: int, piece: Piece, weight: torch.Tensor | None, scale: torch.Tensor | None
    ) -> None:
        """`count`: how often the parameter was updated, this time included."""
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
        """Made once for all parameters that were updated so often; by the stream that reads it."""
        found = self._known.get(key)
        if found is None or found[0] != count:
            if len(self._known) >= MOST_KNOWN:  # a scheduler may change betas in every step
                self._known.clear()
            found = self._known[key] = (count, make())
        return found[1]


def _corrections(betas: tuple[float, float], count: int, device: torch.device) -> torch.Tensor:
    """AdamW's two, as torch's kernel takes them: in fp32, by the device's own power function, whose error the difference
    from 1 blows up in the first steps."""
    powers = [torch.pow(_fp32(beta, device), _fp32(count, device)) for beta in betas]
    return torch.stack([1 - powers[0], (1 - powers[1]).sqrt()])


def _fp32(value: float, device: torch.device) -> torch.Tensor:
    return torch.full((), float(value), dtype=torch.float32, device=device)  # filled there: no copy to wait for


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
    """The kernel, tried for all that is wanted of it; `why_no_device_kernel` says why there is none."""
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
    """Whether two updates come within one ulp of torch's, and codes are those of `_codec`."""
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
    """Of fp32 tensors: equal, or neighbours."""
    towards = torch.nextafter(other, mine)
    return bool(((mine == towards) | (mine.isnan() & other.isnan())).all())


def nearly_all(mine: torch.Tensor, other: torch.Tensor) -> bool:
    """Of codes: equal, but for a few that are neighbours."""
    separate = (mine.int() - other.int()).abs()
    return bool((separate <= 1).all()) and bool(separate.sum() <= MOST_OTHER * separate.numel())
