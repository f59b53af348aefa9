"""Selection and packing on the host by a small C kernel (`_native_select.c`): one or two passes over memory, without the GIL.

It is used if it can be built and if a trial has torch's results; otherwise torch's kernels run. Of equal magnitudes the first in
a row are sent, where torch's choice is undefined; positions are in ascending order.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from scrimp.chunks import FUSED, KINDS, LEVELS, kernel_or_reason, load_library
from scrimp.exchange._packet import packet_nbytes, parts, unpack
from scrimp.exchange._row_topk import COLUMNS, RowTopK, row_topk

SOURCE = Path(__file__).with_name("_native_select.c")
NOTHING = RowTopK(numel=0, per_row=0, from_rest=0)
TRIED = 2 * COLUMNS + 777  # whole rows and a remainder

_POINTER, _INT, _LONG, _DOUBLE = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_double
_KEPT: tuple[Any, ...] = (
    *[_POINTER] * 4, _INT, _LONG, *[_DOUBLE] * 5, *[_LONG] * 2, *[_POINTER] * 3, *[_INT] * 4,
)  # fmt: skip
_ARRIVED: tuple[Any, ...] = (_POINTER, _LONG, _POINTER, _INT, *[_POINTER] * 2, _INT, *[_LONG] * 2, _DOUBLE, *[_LONG] * 2, _INT)
_MEAN: tuple[Any, ...] = (*[_POINTER] * 2, _INT, *[_LONG] * 3, _INT)
_PUT: tuple[Any, ...] = (_POINTER, _INT, _POINTER, _INT, _LONG)


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """Coefficients of a rule. A gradient enters a momentum as carry * u + gradient, and Adam's moments by the betas. The residual
    receives rate * u, or rate * m / (sqrt(s) + eps)."""

    carry: float = 1.0
    betas: tuple[float, float] = (0.0, 0.0)
    rate: float = 1.0
    eps: float = 0.0


@dataclass(frozen=True)
class NativeSelect:
    """Tensors are flat, contiguous, on the CPU and of one size; the residual and the states are fp32. `level` is the
    instruction set, an index of LEVELS. `fused`: whether torch's `index_add_` rounds a product and its sum once."""

    library: ctypes.CDLL
    compiler: str
    level: int
    fused: bool = False

    @property
    def instructions(self) -> str:
        return LEVELS[self.level]

    def describe(self) -> str:
        return f"{self.instructions}, built by {self.compiler}"

    def add(
        self, rest: torch.Tensor | None, states: Sequence[torch.Tensor], gradient: torch.Tensor, numbers: Numbers
    ) -> None:  # fmt: skip
        """Adds a gradient to the states, or, without states, to the residual."""
        self._call(rest, states, gradient, numbers, NOTHING, None, None, masking=False)

    def send(
        self, rest: torch.Tensor, states: Sequence[torch.Tensor], how: RowTopK, dtype: torch.dtype, numbers: Numbers, *,
        masking: bool, gradient: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Adds a gradient, if given, then moves the top-k out of the residual and returns their positions and values. With
        `masking` the first state is cleared there."""
        positions, values = (torch.empty(how.entries, dtype=kind, device="cpu") for kind in (torch.int64, dtype))
        self._call(rest, states, gradient, numbers, how, positions, values, masking=masking and bool(states))
        return positions, values

    def send_into(
        self, packet: torch.Tensor, rest: torch.Tensor, states: Sequence[torch.Tensor], how: RowTopK, dtype: torch.dtype,
        numbers: Numbers, *, masking: bool, gradient: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """The same, into a packet's bytes."""
        places, values = parts(packet, how, dtype)
        positions = torch.empty(how.entries, dtype=torch.int64, device="cpu")
        self._call(rest, states, gradient, numbers, how, positions, values, places, masking=masking and bool(states))

    def arrived(
        self, packets: torch.Tensor, how: RowTopK, dtype: torch.dtype, master: torch.Tensor, times: float,
        weight: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Adds packets, one per rank and row, to a master, times a factor, rank after rank; writes changed entries to `weight`
        too."""
        if not takes([master]) or not _whole(packets, packet_nbytes(how, dtype)):
            raise ValueError("the native kernel is for contiguous CPU tensors, with the master in fp32, and for whole packets")
        if weight is not None and not (weight.is_cpu and weight.is_contiguous() and weight.numel() == how.numel):
            raise ValueError(f"the native kernel writes contiguous weights on the CPU, here {how.numel}")
        if how.numel != master.numel():
            raise ValueError(f"{how} does not fit {master.numel()} elements")
        places, values = parts(packets[0], how, dtype)
        kinds = (0 if weight is None else KINDS[weight.dtype], KINDS[dtype])
        inside = self.library.scrimp_arrived(
            master.data_ptr(), how.numel, _at(weight), kinds[0], places.data_ptr(), values.data_ptr(), kinds[1], how.per_row,
            how.entries, times, *packets.shape[:1], packets.stride(0), self.fused,
        )  # fmt: skip
        if not inside:
            raise ValueError(f"a packet has a place beyond the {how.numel} elements")

    def put(self, row: torch.Tensor, start: int, values: torch.Tensor, dtype: torch.dtype) -> bool:
        """Writes values of any dtype into a row of bytes; returns whether all are finite, and writes zeros if not."""
        room = row.is_cpu and row.is_contiguous() and 0 <= start <= row.nbytes - values.numel() * dtype.itemsize
        if not room or not values.is_cpu or not values.is_contiguous():
            raise ValueError(
                f"{values.numel()} contiguous values on the CPU do not fit a row of {row.nbytes} bytes from {start} on"
            )
        to, kinds = row.data_ptr() + start, (KINDS[dtype], KINDS[values.dtype])
        return bool(self.library.scrimp_put(to, kinds[0], values.data_ptr(), kinds[1], values.numel()))

    def mean(self, rows: torch.Tensor, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Mean over rows of bytes of `numel` values from byte `start` on, in fp32, rank after rank."""
        if start < 0 or start + numel * dtype.itemsize > rows.shape[1] or not _bytes(rows):
            raise ValueError(f"there are not {numel} values from byte {start} on in rows of shape {tuple(rows.shape)} on the CPU")
        mean = torch.empty(numel, dtype=torch.float32, device="cpu")
        self.library.scrimp_mean(
            mean.data_ptr(), rows.data_ptr() + start, KINDS[dtype], numel, rows.shape[0], rows.stride(0), self.level
        )
        return mean

    def select(self, values: torch.Tensor, how: RowTopK) -> torch.Tensor:
        """Positions of the top-k; changes nothing."""
        positions = torch.empty(how.entries, dtype=torch.int64, device="cpu")
        self._call(values, (), None, Numbers(), how, positions, None, masking=False)
        return positions

    def _call(
        self, rest: torch.Tensor | None, states: Sequence[torch.Tensor], gradient: torch.Tensor | None, numbers: Numbers,
        how: RowTopK, positions: torch.Tensor | None, values: torch.Tensor | None, places: torch.Tensor | None = None, *,
        masking: bool,
    ) -> None:  # fmt: skip
        fp32 = [*([] if rest is None else [rest]), *states]
        numel = fp32[0].numel()
        if not takes(fp32, gradient) or len(states) > 2 or (values is not None and values.dtype not in KINDS):
            raise ValueError("the native kernel is for contiguous CPU tensors of one size, with residual and states in fp32")
        if positions is not None and (how.numel != numel or how.per_row > COLUMNS or how.from_rest > how.rest):
            raise ValueError(f"{how} does not fit {numel} elements")  # it would write out of bounds
        first, second = (*states, None, None)[:2]
        kinds = (0 if gradient is None else KINDS[gradient.dtype], 0 if values is None else KINDS[values.dtype])
        self.library.scrimp_kept(
            _at(rest), _at(first), _at(second), _at(gradient), kinds[0], numel,
            numbers.carry, *numbers.betas, numbers.rate, numbers.eps,
            how.per_row, how.from_rest, _at(positions), _at(places), _at(values), kinds[1], masking, self.level,
            torch.get_num_threads(),
        )  # fmt: skip


def _whole(packets: torch.Tensor, nbytes: int) -> bool:
    """Whether these are contiguous rows of so many bytes."""
    return _bytes(packets) and packets.shape[1] == nbytes


def _bytes(rows: torch.Tensor) -> bool:
    return rows.is_cpu and rows.dtype == torch.uint8 and rows.dim() == 2 and rows.stride(1) == 1


def _at(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def takes(fp32: Sequence[torch.Tensor], gradient: torch.Tensor | None = None) -> bool:
    """Whether the kernel accepts these tensors: residual and states, and a gradient."""
    given = (*fp32, gradient) if gradient is not None else (*fp32,)
    return (
        all(tensor.dtype == torch.float32 for tensor in fp32)
        and (gradient is None or gradient.dtype in KINDS)
        and all(t.is_cpu and t.dim() == 1 and t.is_contiguous() and t.numel() == given[0].numel() for t in given)
    )


def host_selection() -> NativeSelect | None:
    """The kernel, built if necessary. The first call decides for the process; `why_no_host_selection` says why there is none."""
    found = _settled()
    return found if isinstance(found, NativeSelect) else None


def why_no_host_selection() -> str | None:
    found = _settled()
    return found if isinstance(found, str) else None


@cache
def _settled() -> NativeSelect | str:
    return kernel_or_reason("SCRIMP_NATIVE", _made)


def _made() -> NativeSelect | str:
    library, compiler = load_library(SOURCE)
    library.scrimp_kept.argtypes, library.scrimp_kept.restype = _KEPT, None
    library.scrimp_put.argtypes, library.scrimp_put.restype = _PUT, _INT
    library.scrimp_mean.argtypes, library.scrimp_mean.restype = _MEAN, None
    library.scrimp_arrived.argtypes, library.scrimp_arrived.restype = _ARRIVED, _INT
    most = library.scrimp_level()
    ways = [(FUSED, True), (FUSED, False), (0, True), (0, False)] if most == FUSED else [(most, False)]
    for level, fused in ways:
        kernel = NativeSelect(library, compiler, level, fused)
        if _tried(kernel):
            return kernel
    return f"it does not find what torch {torch.__version__} finds"


def _tried(kernel: NativeSelect) -> bool:
    """Whether a step has torch's bits, with integers, many of them equal, which are never rounded; and whether a step with Adam's
    moments is close."""
    random, how = torch.Generator().manual_seed(0), row_topk(TRIED, 0.01)

    def drawn(upto: int) -> torch.Tensor:
        return torch.randint(-upto, upto, (TRIED,), generator=random, dtype=torch.int32, device="cpu").float()

    same = []
    for dtype, upto in ((torch.float32, 20), (torch.bfloat16, 3000), (torch.float16, 30000)):
        u, v, gradient = drawn(100), drawn(upto), drawn(100).to(dtype)
        mine_u, mine_v = u.clone(), v.clone()
        numbers = Numbers(carry=0.5, rate=0.25)
        packet = torch.zeros(packet_nbytes(how, dtype), dtype=torch.uint8, device="cpu")
        kernel.send_into(packet, mine_v, [mine_u], how, dtype, numbers, masking=True, gradient=gradient)
        positions, sent = unpack(packet, how, dtype)
        v.add_(u.mul_(0.5).add_(gradient), alpha=0.25)
        starts = range(0, TRIED, COLUMNS)
        sorted_rows = [v[start : start + COLUMNS].abs().sort(descending=True, stable=True).indices + start for start in starts]
        wanted = [*[how.per_row] * how.rows, how.from_rest]
        largest = torch.cat([row[:number].sort().values for row, number in zip(sorted_rows, wanted, strict=True)])
        rounded = v[largest].to(dtype)
        v[largest] -= rounded.float()
        u[largest] = 0
        same += [torch.equal(*pair) for pair in ((positions, largest), (sent, rounded), (mine_u, u), (mine_v, v))]
        mine, weight = drawn(100) / 7, torch.zeros(TRIED, dtype=dtype, device="cpu")
        master = mine.clone().index_add_(0, largest, rounded.float(), alpha=-1 / 3)
        kernel.arrived(packet.view(1, -1), how, dtype, mine, -1 / 3, weight)
        same += [torch.equal(mine, master), torch.equal(weight[largest], master[largest].to(dtype))]
        row = torch.zeros(dtype.itemsize * TRIED, dtype=torch.uint8, device="cpu")
        same += [kernel.put(row, 0, mine, dtype), torch.equal(row.view(dtype), mine.to(dtype))]
        three = (drawn(2000) / 7).to(dtype)[: TRIED // 3 * 3].view(3, -1)
        mean = three[0].float() * (1 / 3)
        for other in three[1:]:
            mean.add_(other, alpha=1 / 3)
        same.append(torch.equal(kernel.mean(three.view(torch.uint8), 0, three.shape[1], dtype), mean))
    m, root, v = drawn(100), drawn(100).abs(), drawn(100)
    everything = RowTopK(numel=TRIED, per_row=COLUMNS, from_rest=how.rest)
    numbers = Numbers(betas=(0.5, 0.0), rate=3.0, eps=1.0)  # the second moment is the gradient's square
    _, sent = kernel.send(v.clone(), [m.clone(), root.clone()], everything, torch.float32, numbers, masking=False, gradient=root)
    same.append(torch.allclose(sent, v + 3 * (m + root) / 2 / (root + 1), rtol=1e-5, atol=1e-5))
    return all(same)
