"""A step of VGG-16 within a budget and with sparse exchange, by scrimp's selection and by that of DGC under the same memory
management: `python -m bench.selection.step [--device cpu --small]`.

The second engine is the first with another way to find what travels: a threshold from a sample of one in a hundred, a magnitude
copy and a mask of the whole parameter, and the positions over it (`bench.memory.dgc.largest`), which the host has to wait for.
Both run in turns in processes of their own; seconds of the median step are shown.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from statistics import median
from unittest.mock import patch

import torch

import scrimp
from bench.gpu.cases import ACTIVATIONS
from bench.machine import machine
from bench.memory.case import DENSITY, Case
from bench.memory.dgc import largest
from scrimp.exchange import Bucket, ErrorFeedback, Momentum, Part, RowTopK, device_selection

OURS, DGC = "scrimp's selection", "DGC's selection"
TARGET = 1.12  # times as fast
WARM_UP, STEPS, ROUNDS = 6, 30, 5
SENT: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by where their packet would be


def send_as_dgc(
    self: ErrorFeedback, packet: torch.Tensor, gradient: torch.Tensor, how: RowTopK, dtype: torch.dtype, lr: float, count: int =
    1, *, first: bool = True, sound: torch.Tensor | None = None,
) -> None:  # fmt: skip
    (rest,), (u,) = self.rest.tensors.values(), self.states
    assert isinstance(self.rule, Momentum)
    kernel = device_selection(rest.device, dtype)
    if kernel is not None:  # what comes before the selection is the same for both
        kernel.accumulate(gradient, u, rest, carry=self.rule.momentum, whole=True, rate=lr, sound=sound)
    else:
        self.add(gradient, lr, first=first, sound=sound)
        rest.add_(u, alpha=lr)
    positions = largest(rest, density=DENSITY, sample=0.01)
    values = rest[positions]
    rest.index_fill_(0, positions, 0)
    u.index_fill_(0, positions, 0)
    SENT[packet.data_ptr()] = (positions, values)


def subtract_as_dgc(
    master: torch.Tensor, rows: torch.Tensor, bucket: Bucket, part: Part, scale: float, weight: torch.Tensor | None = None
) -> None:
    positions, values = SENT.pop(rows[0, part.start : part.stop].data_ptr())
    master.index_add_(0, positions, values, alpha=-scale)
    if weight is not None:
        weight[positions] = master[positions].to(weight.dtype)


def seconds(name: str, case: Case, budget: str, recompute: str) -> list[float]:
    engine = scrimp.Engine(
        case.model("meta"), optimizer=scrimp.SGD(lr=case.rate, momentum=case.momentum), memory=scrimp.Memory(device=budget),
        precision=case.precision, activations=ACTIVATIONS[recompute], device=case.device, exchange=scrimp.Sparse(density=DENSITY),
        skip_nonfinite=False,
    )  # fmt: skip
    batch, found = case.inputs(case.batch), []

    def run() -> None:
        for _ in range(WARM_UP + STEPS):
            if case.device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            engine.step(*batch)
            if case.device == "cuda":
                torch.cuda.synchronize()
            found.append(time.perf_counter() - start)

    if name == OURS:
        run()
    else:
        with (
            patch.object(ErrorFeedback, "send_into", send_as_dgc),
            patch("scrimp.engine.gradients.apply.subtract_mean", subtract_as_dgc),
        ):
            run()
    assert {placement.tier for placement in engine._run.store.placements if placement.weights.numel()} == {"device"}, (
        "give it more room"
    )
    return found[WARM_UP:]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="a small stand-in, for a CPU")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--budget", default="6GiB", help="of the device: all homes must fit there")
    parser.add_argument("--recompute", default="all", choices=["auto", "all", "none"])
    parser.add_argument("--one", choices=[OURS, DGC], help="measure this one here, and print its seconds")
    args = parser.parse_args(arguments)
    case = Case(model_name="vgg16", device=args.device, small=args.small, precision="bf16", batch=args.batch)
    if args.one:
        print(json.dumps(seconds(args.one, case, args.budget, args.recompute)))
        return
    times: dict[str, list[float]] = {OURS: [], DGC: []}
    given = ["--device", args.device, "--batch", str(args.batch), "--budget", args.budget, "--recompute", args.recompute]
    for _ in range(ROUNDS):
        for name in times:
            command = [sys.executable, "-m", "bench.selection.step", *given, *(["--small"] if args.small else []), "--one", name]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(done.stderr[-3000:])
            times[name] += json.loads(done.stdout.strip().splitlines()[-1])
    middle = {name: median(found) for name, found in times.items()}
    for name, found in times.items():
        print(f"{name}: {1000 * middle[name]:.2f} ms a step ({1000 * min(found):.2f} to {1000 * max(found):.2f})")
    ratio = middle[DGC] / middle[OURS]
    print(f"{ratio:.3f} times as fast, at least {TARGET} asked: {'reached' if ratio >= TARGET else 'NOT REACHED'}")
    print(json.dumps({**machine(), "batch": args.batch, "budget": args.budget, "recompute": args.recompute}))


if __name__ == "__main__":
    main()
