"""Sending and applying on a device by a few Triton kernels (`_select_kernels.py`): the same as `_select.py`, `_packet.py` and
`_bucket.py` do with torch, in five passes over the residual, directly into the packet, and without waiting for the device.

`device_selection` returns them if Triton is installed, if they compile, and if a trial has torch's bits. Otherwise torch does the
work. Of equal magnitudes the first in a row are sent, where torch's choice is undefined; positions are in ascending order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from scrimp.chunks import kernel_or_reason, triton_at_hand
from scrimp.exchange._packet import packet_nbytes, parts, unpack
from scrimp.exchange._row_topk import COLUMNS, RowTopK, row_topk

SPLITS, BINS = 8, 256  # as in the kernels: chunks of a row, and values of a digit
DIGITS = ((23, 8), (15, 8), (7, 8), (0, 7))  # of a magnitude's bits: lowest bit and width
BLOCK, WARPS = 1024, 8
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CAPABILITY = (8, 0)
TRIED = 2 * COLUMNS + 777  # whole rows and a remainder


def scratch_nbytes(numel: int) -> int:
    """Scratch bytes of `send`, besides residual and packet: a 16th of an fp32 residual."""
    return 2 * -(-numel // COLUMNS) * SPLITS * (BINS + 2) * 4


@dataclass(frozen=True)
class FusedExchange:
    """The kernels. All tensors are flat, contiguous and on one device."""

    kernels: Any

    def accumulate(
        self, gradient: torch.Tensor, momentum: torch.Tensor | None, residual: torch.Tensor, *, carry: float, whole: bool,
        rate: float = 1.0, sound: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Adds a gradient of any dtype to the fp32 momentum, and, when the step's gradient is `whole`, `rate` times the momentum
        to the fp32 residual. `carry`: the momentum's factor for the first of a step's micro-batches, 1 for the others. Without
        momentum every gradient goes into the residual. `sound`: a flag on the device; if False the gradient counts as 0."""
        numel = residual.numel()
        _check(residual, *([] if momentum is None else [momentum]), numel=numel)
        _check_as(residual, gradient, DTYPES, numel)
        if not numel:
            return
        with torch.cuda.device_of(residual):  # type: ignore[no-untyped-call]
            self.kernels.accumulate[(-(-numel // BLOCK),)](
                gradient, residual if momentum is None else momentum, residual,
                residual if sound is None else sound.view(torch.uint8), numel, float(carry), float(rate),
                buffered=momentum is not None, whole=whole or momentum is None, checked=sound is not None, block=BLOCK,
                num_warps=WARPS, enable_fp_fusion=False,
            )  # fmt: skip

    def send(
        self, residual: torch.Tensor, how: RowTopK, packet: torch.Tensor, dtype: torch.dtype, masked: torch.Tensor | None = None
    ) -> None:
        """Moves the top-k of an fp32 residual into a packet's bytes. `masked`: the momentum, which is cleared at the same
        positions."""
        _check(residual, *([] if masked is None else [masked]), numel=how.numel)
        _check_as(residual, packet, (torch.uint8,), packet_nbytes(how, dtype))
        if not how.numel:
            return
        places, sent = parts(packet, how, dtype)
        rows, device = -(-how.numel // COLUMNS), residual.device
        counts = torch.empty(2, rows, SPLITS, BINS, dtype=torch.int32, device=device)
        state = torch.empty(2, rows, 2 * SPLITS, dtype=torch.int32, device=device)
        grid, before = (rows * SPLITS,), 0
        with torch.cuda.device_of(residual):  # type: ignore[no-untyped-call]
            for turn, (shift, width) in enumerate(DIGITS):
                old, new = (turn + 1) % 2, turn % 2
                self.kernels.count[grid](
                    residual, counts[old], state[old], counts[new], state[new], how.numel, how.per_row, how.from_rest,
                    width_before=before, shift=shift, width=width, columns=COLUMNS, num_warps=WARPS,
                )  # fmt: skip
                before = width
            self.kernels.send[grid](
                residual, residual if masked is None else masked, places, sent, counts[new], state[new], how.numel,
                how.per_row, torch.finfo(dtype).max, masking=masked is not None, width=before, columns=COLUMNS, num_warps=WARPS,
                enable_fp_fusion=False,
            )  # fmt: skip

    def apply(
        self, packet: torch.Tensor, how: RowTopK, dtype: torch.dtype, into: torch.Tensor, share: float,
        wrong: torch.Tensor | None = None, *, weight: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Adds `share` times one rank's packet to a flat fp32 tensor, and writes changed entries to `weight` too. `wrong`, an
        int32 scalar on the device, becomes 1 if a position is out of range; that entry is skipped."""
        _check(into, numel=how.numel)
        _check_as(into, packet, (torch.uint8,), packet_nbytes(how, dtype))
        if wrong is not None:
            _check_as(into, wrong, (torch.int32,), 1)
        if weight is not None:
            _check_as(into, weight, DTYPES, how.numel)
        if not how.entries:
            return
        places, sent = parts(packet, how, dtype)
        with torch.cuda.device_of(into):  # type: ignore[no-untyped-call]
            self.kernels.apply[(-(-how.entries // BLOCK),)](
                places, sent, into, into if weight is None else weight, into if wrong is None else wrong, how.numel, how.per_row,
                how.entries, float(share), written=weight is not None, told=wrong is not None, columns=COLUMNS, block=BLOCK,
                num_warps=WARPS, enable_fp_fusion=False,
            )  # fmt: skip


def _check(first: torch.Tensor, *others: torch.Tensor, numel: int) -> None:
    for tensor in (first, *others):
        _check_as(first, tensor, (torch.float32,), numel)


def _check_as(first: torch.Tensor, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], numel: int) -> None:
    if tensor.dtype not in dtypes or tensor.numel() != numel or not tensor.is_contiguous() or tensor.device != first.device:
        raise ValueError(
            f"the device's kernels want {numel} contiguous elements of {' or '.join(map(str, dtypes))} on {first.device}, and "
            f"this is {tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}"
        )


def device_selection(device: torch.device, dtype: torch.dtype) -> FusedExchange | None:
    """The kernels, after a trial with values of that dtype; `why_no_device_selection` says why there are none."""
    found = _settled(device, dtype)
    return found if isinstance(found, FusedExchange) else None


def why_no_device_selection(device: torch.device, dtype: torch.dtype) -> str | None:
    found = _settled(device, dtype)
    return found if isinstance(found, str) else None


@cache
def _settled(device: torch.device, dtype: torch.dtype) -> FusedExchange | str:
    return kernel_or_reason("SCRIMP_FUSED", partial(_made, device, dtype))


def _made(device: torch.device, dtype: torch.dtype) -> FusedExchange | str:
    if device.type != "cuda":
        return "it is for CUDA devices"
    if torch.cuda.get_device_capability(device) < CAPABILITY:
        return f"it is for devices of capability {CAPABILITY[0]}.{CAPABILITY[1]} or more"
    with triton_at_hand():
        kernel = FusedExchange(_kernels())
        return kernel if _tried(kernel, device, dtype) else f"its bits are not those of torch {torch.__version__} for {dtype}"


def _kernels() -> Any:
    from scrimp.exchange import _select_kernels

    return _select_kernels


def _tried(kernel: FusedExchange, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a step has torch's bits: rows with many equal numbers, and a remainder."""
    from scrimp.exchange._select import take

    random = torch.Generator().manual_seed(0)
    how = row_topk(TRIED, 0.01)
    gradient, u, v = (torch.randn(TRIED, generator=random, dtype=torch.float32, device="cpu").to(device) for _ in range(3))
    v[:COLUMNS] = (v[:COLUMNS] * 4).round()  # ties, of which the first are sent
    gradient[:COLUMNS] = u[:COLUMNS] = 0
    mine_u, mine_v = u.clone(), v.clone()
    kernel.accumulate(gradient.to(dtype), mine_u, mine_v, carry=0.9, whole=True)
    v.add_(u.mul_(0.9).add_(gradient.to(dtype)))
    packet = torch.empty(packet_nbytes(how, dtype), dtype=torch.uint8, device=device)
    kernel.send(mine_v, how, packet, dtype, mine_u)
    rows = [(start, min(start + COLUMNS, TRIED)) for start in range(0, TRIED, COLUMNS)]
    largest = [v[start:stop].abs().sort(descending=True, stable=True).indices + start for start, stop in rows]
    wanted = [*[how.per_row] * how.rows, how.from_rest]
    positions = torch.cat([found[:number].sort().values for found, number in zip(largest, wanted, strict=True)])
    sent = take(v, positions, dtype)
    u[positions] = 0
    places, values = unpack(packet, how, dtype)
    mean, mine, wrong = torch.zeros_like(v), torch.zeros_like(v), torch.zeros(1, dtype=torch.int32, device=device)
    mean[positions] = sent.float() * 0.25
    weight = torch.zeros_like(mine, dtype=dtype)
    kernel.apply(packet, how, dtype, mine, 0.25, wrong, weight=weight)
    pairs = (
        (mine_u, u), (mine_v, v), (places, positions), (values, sent), (mine, mean), (weight, mean.to(dtype)),
        (wrong, torch.zeros_like(wrong)),
    )  # fmt: skip
    return all(torch.equal(got, want) for got, want in pairs)
