"""What a step of sparse exchange costs on one GPU beside the network: selecting, packing and applying, by torch and by the
kernels of scrimp.exchange.

    python -m bench.selection [--numel 25000000] [--world 4] [--values bf16] [--profile]

Milliseconds between CUDA events, the median of 20 after a warm-up; each step apart, and all of them in one go, which is what
the target is for. The target that the mean is added to is zeroed in the time of applying, as it must be in every step. Before
anything is timed the two ways are compared, entry by entry.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from bench.machine import machine
from scrimp.exchange import (
    Bucket,
    FusedExchange,
    average_onto,
    device_selection,
    pack,
    plan_bucket,
    scratch_nbytes,
    select_topk,
    take,
    unpack,
    why_no_device_selection,
)

DENSITIES = (0.01, 0.001)
WARM_UP, REPEATS = 5, 20
TARGET = 1.0  # milliseconds: selecting, packing and applying of 25M elements on one H200
VALUES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
WHOLE = "all in one go"
Step = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Field:
    """What a step works on. Residual and momentum are filled anew before each."""

    bucket: Bucket
    numel: int
    residual: torch.Tensor
    momentum: torch.Tensor
    target: torch.Tensor
    packet: torch.Tensor
    rows: torch.Tensor  # of all ranks
    wrong: torch.Tensor
    first: torch.Tensor

    def fill(self) -> None:
        self.residual.copy_(self.first)
        self.momentum.fill_(1.0)


def field_of(numel: int, density: float, dtype: torch.dtype, world: int) -> Field:
    bucket = plan_bucket([("weight", numel)], density, dtype)
    part = bucket.parts[0]
    assert part.how is not None
    random = torch.Generator("cuda").manual_seed(0)
    first, rows = torch.empty(0), torch.zeros(world, bucket.nbytes, dtype=torch.uint8, device="cuda")
    for rank in range(world):  # the others' first; of very different magnitudes, as gradients are
        first = torch.randn(numel, generator=random, device="cuda")
        first.mul_(torch.randn(numel, generator=random, device="cuda").exp_())
        positions = select_topk(first, part.how)
        pack(rows[rank, part.start : part.stop], part.how, positions, take(first.clone(), positions, dtype))
    return Field(
        bucket=bucket, numel=numel, residual=first.clone(), momentum=torch.ones_like(first), target=torch.zeros_like(first),
        packet=rows[world - 1, part.start : part.stop].clone(), rows=rows,
        wrong=torch.zeros(world, dtype=torch.int32, device="cuda"), first=first,
    )  # fmt: skip


def by_torch(on: Field) -> dict[str, Step]:
    part, dtype = on.bucket.parts[0], on.bucket.dtype
    assert part.how is not None
    how, found = part.how, {}

    def selecting() -> None:
        found["positions"] = select_topk(on.residual, how)

    def taking() -> None:
        found["values"] = take(on.residual, found["positions"], dtype)
        on.momentum[found["positions"]] = 0

    def packing() -> None:
        pack(on.packet, how, found["positions"], found["values"])

    def applying() -> None:
        on.target.zero_()
        assert average_onto(on.rows, on.bucket, lambda _: on.target) is None

    return {"select": selecting, "take": taking, "pack": packing, "apply": applying}


def by_kernels(on: Field, kernel: FusedExchange) -> dict[str, Step]:
    part, dtype, world = on.bucket.parts[0], on.bucket.dtype, on.rows.shape[0]
    assert part.how is not None
    how = part.how

    def applying() -> None:
        on.target.zero_()
        for rank in range(world):
            here = on.rows[rank, part.start : part.stop]
            kernel.apply(here, how, dtype, on.target, 1 / world, on.wrong[rank])

    return {
        "select, take and pack": lambda: kernel.send(on.residual, how, on.packet, dtype, on.momentum),
        "apply": applying,
    }


def accumulating(on: Field, kernel: FusedExchange | None) -> Step:
    """For comparison: not in the target."""
    gradient = on.first.to(torch.bfloat16)

    def with_torch() -> None:
        on.residual.add_(on.momentum.mul_(0.9).add_(gradient))

    if kernel is None:
        return with_torch
    return lambda: kernel.accumulate(gradient, on.momentum, on.residual, carry=0.9, whole=True)


def milliseconds(on: Field, steps: Sequence[Step]) -> list[float]:
    """Of each step, in their order; the median over repeats."""
    taken: list[list[float]] = [[] for _ in steps]
    for repeat in range(WARM_UP + REPEATS):
        on.fill()
        torch.cuda.synchronize()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(steps) + 1)]
        marks[0].record()
        for step, mark in zip(steps, marks[1:], strict=True):
            step()
            mark.record()
        torch.cuda.synchronize()
        for times, start, stop in zip(taken, marks, marks[1:], strict=False):
            if repeat >= WARM_UP:
                times.append(start.elapsed_time(stop))
    return [statistics.median(times) for times in taken]


def figures(on: Field, steps: dict[str, Step]) -> dict[str, float]:
    def everything() -> None:
        for step in steps.values():
            step()

    return {**dict(zip(steps, milliseconds(on, [*steps.values()]), strict=True)), WHOLE: milliseconds(on, [everything])[0]}


def differences(on: Field, ways: Sequence[dict[str, Step]]) -> list[int]:
    """Entries that one way has and the other has not, residuals that differ, and elements of the mean that do. Of equal
    magnitudes torch may send any."""
    part, seen = on.bucket.parts[0], []
    assert part.how is not None
    for steps in ways:
        on.fill()
        for step in steps.values():
            step()
        positions = unpack(on.packet, part.how, on.bucket.dtype)[0].sort().values
        seen.append((positions, on.residual.clone(), on.target.clone()))
    return [int((mine != other).sum()) for mine, other in zip(*seen, strict=True)]


def report(numel: int, density: float, dtype: torch.dtype, world: int, *, profiled: bool) -> None:
    on = field_of(numel, density, dtype, world)
    part, kernel = on.bucket.parts[0], device_selection(torch.device("cuda", torch.cuda.current_device()), dtype)
    assert part.how is not None
    print(f"\n## density {density:.1%}: {part.how.entries} of {numel} elements, {part.how.per_row} a row, {world} ranks\n")
    ways = {"torch": by_torch(on)}
    if kernel is None:
        print(f"no kernels: {why_no_device_selection(torch.device('cuda', torch.cuda.current_device()), dtype)}\n")
    else:
        ways["kernels"] = by_kernels(on, kernel)
        entries, residuals, means = differences(on, [*ways.values()])
        print(f"kernels against torch: {entries} entries differ, {residuals} residuals, {means} of the mean")
        print(
            f"they need {scratch_nbytes(numel) / 2**20:.1f} MiB while they select; flags of wrong places: {on.wrong.tolist()}\n"
        )
    print("| way | step | ms |\n| --- | --- | ---: |")
    whole = {}
    for name, steps in ways.items():
        found = figures(on, steps)
        found["(accumulate)"] = milliseconds(on, [accumulating(on, kernel if name == "kernels" else None)])[0]
        for step, value in found.items():
            print(f"| {name} | {step} | {value:.3f} |", flush=True)
        whole[name] = found[WHOLE]
    best = min(whole, key=lambda name: whole[name])
    print(f"\ntarget of {TARGET} ms: {'met' if whole[best] < TARGET else 'not met'} by {best}, {whole[best]:.3f} ms", end="")
    print(f"; torch takes {whole['torch'] / whole['kernels']:.1f} times as long" if "kernels" in whole else "")
    if profiled and kernel is not None:
        profile(on, ways["kernels"])


def profile(on: Field, steps: dict[str, Step]) -> None:
    """What each kernel takes of it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(REPEATS):
            on.fill()
            for step in steps.values():
                step()
        torch.cuda.synchronize()
    print(f"\n{profiler.key_averages().table(sort_by='self_cuda_time_total', row_limit=12, max_name_column_width=40)}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=25_000_000)
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--values", choices=VALUES, default="bf16", help="what travels")
    parser.add_argument("--profile", action="store_true", help="and what each kernel takes, by torch's profiler")
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("bench.selection needs a CUDA device, and torch sees none")
    print("# python -m bench.selection\n")
    for name, value in machine().items():
        print(f"- {name}: {value}")
    for density in DENSITIES:
        report(args.numel, density, VALUES[args.values], args.world, profiled=args.profile)
