"""Measures the rates of operators, class by class; `Cluster.probe(operators=True)` runs it.

Each class has one typical operator, measured at rising sizes, and calls of other shapes whose seconds are then predicted: the
error of that is part of the result. Calls run one after another, as in a step, so that a GPU's launches overlap.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor
from torch.nn import functional

from scrimp.chunks import occupy, settle
from scrimp.cluster import CLASSES, OperatorRate, Operators
from scrimp.engine.setup.validate import pick_device

DTYPES = (torch.float32, torch.bfloat16)
BEST_OF = 3
SECONDS, SECONDS_CPU = 0.02, 0.01  # of calls in a row
MOST_QUEUED = 200  # calls: a GPU's queue has room for a thousand kernels
HEAD_DIM = 128  # of attention
CACHE_NBYTES, MOST_TENSORS = 1 << 27, 16


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """`rows`: of square matrix products; `tokens`: sequence lengths of attention with `heads` heads; `pixels`: sides of images;
    `numel`: elements of what memory bounds, in rows of `width`."""

    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    heads: int
    pixels: tuple[int, ...]
    numel: tuple[int, ...]
    width: int


CUDA = Sizes(
    rows=(128, 256, 512, 1024, 2048, 4096, 8192), tokens=(128, 512, 2048, 4096), heads=16, pixels=(14, 28, 56, 112),
    numel=(1 << 14, 1 << 17, 1 << 20, 1 << 23, 1 << 26), width=4096,
)  # fmt: skip
CPU = Sizes(
    rows=(16, 32, 64, 128, 256, 512), tokens=(32, 128, 512), heads=4, pixels=(7, 14, 28),
    numel=(1 << 8, 1 << 11, 1 << 14, 1 << 17, 1 << 20, 1 << 22), width=512,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Call:
    """`size`: FLOPs or bytes, as the planner counts them for such an operator."""

    size: float
    run: Callable[[], object]


def probe_operators(device: str | torch.device | None = None) -> Operators:
    """Of the device that an engine would use: ten seconds on a CPU, half a minute on a GPU."""
    where = pick_device(device)
    rates = []
    for dtype in DTYPES:
        made = Calls(where, dtype, CUDA if where.type == "cuda" else CPU)
        rates += [_measured(made, operators) for operators in CLASSES]
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu"
    return Operators(device=name, rates=tuple(rates))


def _measured(made: Calls, operators: str) -> OperatorRate:
    points: dict[float, float] = {}
    for call in made.ladder(operators):
        points[call.size] = _seconds(call, made.device)
    rate = OperatorRate(
        operators=operators, dtype=str(made.dtype).removeprefix("torch."), points=tuple(sorted(points.items())), error=0.0
    )
    errors = []
    for call in made.others(operators):
        seconds = _seconds(call, made.device)
        errors.append(abs(rate.seconds(call.size) - seconds) / seconds)
    return OperatorRate(operators=rate.operators, dtype=rate.dtype, points=rate.points, error=max(errors, default=0.0))


def _seconds(call: Call, device: torch.device) -> float:
    """Of one call among many: the best of a few runs. A GPU is kept busy until the host has queued all calls, so that its own
    seconds count, as in a step in which it always has work."""

    def several(times: int, ahead: float = 0.0) -> float:
        settle(device)
        if device.type != "cuda":
            start = time.perf_counter()
            for _ in range(times):
                call.run()
            return (time.perf_counter() - start) / times
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        occupy(device, times * ahead)
        begin.record()
        for _ in range(times):
            call.run()
        end.record()
        settle(device)
        return float(begin.elapsed_time(end)) / 1e3 / times

    several(2)
    once = several(2)
    if device.type == "cuda":
        times = max(1, min(MOST_QUEUED, int(SECONDS / once)))
        return min(several(times, 2 * once) for _ in range(BEST_OF))
    times = max(1, min(1000, int(SECONDS_CPU / once)))
    return min(several(times) for _ in range(BEST_OF))


class Calls:
    """Calls of each class. A backward is that of autograd, of a forward that ran once."""

    def __init__(self, device: torch.device, dtype: torch.dtype, sizes: Sizes) -> None:
        self.device, self.dtype, self.sizes = device, dtype, sizes
        self._random = torch.Generator(device).manual_seed(0)  # its own, so that the run's random state is untouched

    def ladder(self, operators: str) -> Iterator[Call]:
        sizes = self.sizes
        match operators.removesuffix(", backward"):
            case "matmul":
                for rows in sizes.rows:
                    yield self._matmul(rows, rows, rows)
            case "attention" | "causal attention":
                for tokens in sizes.tokens:
                    yield self._attention(operators, tokens, sizes.heads, HEAD_DIM)
            case "convolution":
                for pixels in sizes.pixels:
                    yield self._convolution(operators, 8, 64, pixels)
            case _:
                for numel in sizes.numel:
                    width = min(sizes.width, numel)
                    yield self._bound(operators, numel // width, width)

    def others(self, operators: str) -> Iterator[Call]:
        """Shapes between and beside those of the ladder."""
        sizes = self.sizes
        match operators.removesuffix(", backward"):
            case "matmul":
                rows = sizes.rows[-2]
                yield self._matmul(rows // 2, 2 * rows, rows)
                yield self._matmul(2 * rows, rows // 4, rows)
            case "attention" | "causal attention":
                yield self._attention(operators, 3 * sizes.tokens[-1] // 4, sizes.heads, HEAD_DIM)
                yield self._attention(operators, sizes.tokens[-1] // 2, 2 * sizes.heads, HEAD_DIM)
            case "convolution":
                yield self._convolution(operators, 4, 128, sizes.pixels[-2])
            case _:
                yield self._bound(operators, 3 * sizes.numel[-2] // sizes.width, sizes.width)
                yield self._bound(operators, 3 * sizes.numel[-2] // (2 * sizes.width), 2 * sizes.width)

    def _random_tensor(self, *shape: int, grad: bool = False) -> Tensor:
        made = torch.empty(shape, device=self.device, dtype=self.dtype).normal_(generator=self._random)
        return made.requires_grad_(grad)

    def _matmul(self, m: int, k: int, n: int) -> Call:
        one, other = self._random_tensor(m, k), self._random_tensor(k, n)
        return Call(size=2 * m * k * n, run=lambda: torch.mm(one, other))

    def _attention(self, operators: str, tokens: int, heads: int, dim: int) -> Call:
        backward = operators.endswith("backward")
        query, keys, values = (self._random_tensor(1, heads, tokens, dim, grad=backward) for _ in range(3))
        causal = operators.startswith("causal")
        product = 2 * heads * tokens * tokens * dim
        return self._either(
            lambda: functional.scaled_dot_product_attention(query, keys, values, is_causal=causal),
            (query, keys, values), 2 * product, 5 * product, backward=backward,
        )  # fmt: skip

    def _convolution(self, operators: str, batch: int, channels: int, pixels: int) -> Call:
        backward = operators.endswith("backward")
        images = self._random_tensor(batch, channels, pixels, pixels, grad=backward)
        weight = self._random_tensor(channels, channels, 3, 3, grad=backward)
        flops = 2 * batch * pixels**2 * channels**2 * 9
        return self._either(
            lambda: functional.conv2d(images, weight, padding=1), (images, weight), flops, 2 * flops, backward=backward
        )

    def _bound(self, operators: str, rows: int, width: int) -> Call:
        """Calls take turns on several tensors, more than a cache holds: in a step, too, most inputs come from memory."""
        rows = max(1, rows)
        one = rows * width * self.dtype.itemsize
        calls = [self._on_memory(operators, rows, width, one) for _ in range(max(1, min(MOST_TENSORS, CACHE_NBYTES // one)))]
        turns = cycle(calls)
        return Call(size=calls[0].size, run=lambda: next(turns).run())

    def _on_memory(self, operators: str, rows: int, width: int, one: int) -> Call:
        backward = operators.endswith("backward")
        x = self._random_tensor(rows, width, grad=backward)
        match operators.removesuffix(", backward"):
            case "normalization":
                weight = self._random_tensor(width, grad=backward)
                return self._either(
                    lambda: functional.layer_norm(x, (width,), weight, weight), (x, weight), 2 * one, 3 * one, backward=backward
                )
            case "softmax":
                return Call(size=2 * one, run=lambda: torch.softmax(x, -1))
            case "lookup":
                index = torch.randint(rows, (rows,), device=self.device, generator=self._random)
                if not backward:
                    return Call(size=2 * one + index.nbytes, run=lambda: functional.embedding(index, x))
                gradient, put = self._random_tensor(rows, width), torch.ops.aten.embedding_dense_backward.default
                return Call(size=2 * (one + index.nbytes), run=lambda: put(gradient, index, rows, -1, False))
            case "reduction":
                return Call(size=one + rows * self.dtype.itemsize, run=lambda: x.sum(-1))
            case "reduction of rows":
                return Call(size=one + width * self.dtype.itemsize, run=lambda: x.sum(0))
            case "transposing copy":  # of heads
                heads = x.view(rows, -1, min(width, HEAD_DIM)).transpose(0, 1)
                return Call(size=2 * one, run=lambda: heads.clone(memory_format=torch.contiguous_format))
            case "concatenation":  # of halves of heads
                halves = x.view(-1, min(width, HEAD_DIM)).chunk(2, -1)
                return Call(size=2 * one, run=lambda: torch.cat(halves, -1))
            case "cast":
                other = torch.bfloat16 if self.dtype == torch.float32 else torch.float32
                return Call(size=one * (1 + other.itemsize / self.dtype.itemsize), run=lambda: x.to(other))
            case "broadcast":
                row = self._random_tensor(width)
                return Call(size=2 * one + row.nbytes, run=lambda: x * row)
        y = self._random_tensor(rows, width)
        return Call(size=3 * one, run=lambda: x + y)

    def _either(
        self, run: Callable[[], Tensor], inputs: tuple[Tensor, ...], ahead: float, behind: float, *, backward: bool
    ) -> Call:  # fmt: skip
        if not backward:
            return Call(size=ahead, run=run)
        made = run()
        gradient = torch.ones_like(made)
        return Call(size=behind, run=lambda: torch.autograd.grad(made, inputs, gradient, retain_graph=True))
