"""One contender of one part in a process of its own: `python -m bench.memory.run PART NAME CASE GIVEN SECONDS`.

GIVEN is what the part needs to know of other rows, SECONDS how long a search may last. It prints one line of JSON. Peaks are
of the steps, with all that was made before them.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

import scrimp
from bench.gpu.contenders import join_alone
from bench.memory.case import Case
from bench.memory.contenders import CONTENDERS, DGC, WHOLE, Training, by_dgc, by_scrimp
from bench.memory.meter import CudaPeak, MappedPeak
from bench.memory.page import TIMES
from bench.memory.search import Trial, downward, largest_batch, least
from scrimp.cli import profiled_peak

STEPS = 3  # of a trial: the first is traced, the second follows the plan for it
DID_NOT_FIT = ("FitError", "OutOfMemoryError", "took")


def exchange(name: str, case: Case, given: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """The peak of a whole run. One of a single layer before it makes what the libraries keep: code, threads, workspaces."""
    contender = CONTENDERS[name]
    if contender.ddp:
        join_alone("nccl" if case.device == "cuda" else "gloo")
    meter: CudaPeak | MappedPeak = CudaPeak() if case.device == "cuda" else MappedPeak()
    batch = case.inputs(case.batch)
    trained(partial(contender.build, replace(case, layers=1)), batch)
    collect()
    if case.device == "cpu":
        meter.restart()
    training = contender.build(case)
    if case.device == "cuda":
        meter.restart()  # with what has been built, but not with what building took
    losses = [float(training.step(*batch)) for _ in range(case.steps)]
    row = {"losses": losses, "peak_nbytes": meter.nbytes(), "weights_nbytes": case.weights_nbytes()}
    if training.engine is None:
        return row
    books = training.engine.ledger
    kinds = {kind: nbytes for kind, nbytes in books.peak.by_kind if nbytes}
    return {**row, "ledger_nbytes": books.peak_nbytes, "kinds": kinds, "host_tier_nbytes": books.host.total_nbytes}


def step(name: str, case: Case, given: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """The peak of a step at the case's batch; scrimp's under ever smaller budgets, from half of the DGC layout's peak."""
    if name == DGC:
        return {"peak_nbytes": dgc_peak(case, case.batch)}
    found = downward(
        lambda budget, accumulate: trial(case, budget, case.batch, accumulate),
        given["peak_nbytes"] // 2,
        most_accumulate=case.batch,
        late=clock(seconds),
    )
    best = least(found)
    row = _said(found)
    if best is None:
        return {**row, "failed": f"not within {given['peak_nbytes'] // 2} bytes, with any micro-batches"}
    return {**row, "peak_nbytes": best.peak_nbytes, "accumulate": best.accumulate}


def batch(name: str, case: Case, given: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """The largest batch within the budget, whole; and of scrimp, the fewest micro-batches with which four times the DGC
    layout's batch fits."""
    budget = given["peak_nbytes"]
    if name == DGC:
        found = largest_batch(lambda n: dgc_peak(case, n) <= budget, case.batch, late=clock(seconds))
        return {"batch": found, "budget_nbytes": budget}
    trials: list[Trial] = []

    def fits(n: int, accumulate: int = 1) -> bool:
        trials.append(trial(case, budget, n, accumulate))
        return trials[-1].peak_nbytes is not None

    late = clock(seconds)
    whole = largest_batch(fits, given["batch"], late=late)
    wanted, accumulate = TIMES * given["batch"], 1
    while whole < wanted and accumulate < wanted:
        accumulate *= 2
        if fits(-(-wanted // accumulate) * accumulate, accumulate):  # which splits into equal parts
            break
    parts = [each.accumulate for each in trials if each.batch >= wanted and each.peak_nbytes is not None]
    row = {"batch": whole, "budget_nbytes": budget, "wanted": wanted, "accumulate": min(parts, default=None)}
    return {**row, **_said(trials)}


def _said(trials: list[Trial]) -> dict[str, Any]:
    """With what went wrong otherwise than by not fitting: it ended no search, but it must not go unseen."""
    row: dict[str, Any] = {"trials": [asdict(each) for each in trials]}
    wrong = [each.why for each in trials if each.why and not each.why.startswith(DID_NOT_FIT)]
    return {**row, "wrong": wrong} if wrong else row


def trial(case: Case, budget: int, batch: int, accumulate: int, sparse: Mapping[str, str] | None = WHOLE) -> Trial:
    """scrimp once. What passes the budget by our meter did not fit, whatever it says itself."""
    start = time.monotonic()
    build = partial(by_scrimp, case, sparse=sparse, budget_nbytes=budget, recompute="all", accumulate=accumulate)
    peak, why = None, ""
    try:
        peak = (cuda_peak if case.device == "cuda" else engine_peak)(build, case.inputs(batch))
    except (scrimp.ScrimpError, torch.OutOfMemoryError) as error:
        why = f"{type(error).__name__}: {error}"
    collect()
    if case.device == "cuda":
        torch.cuda.set_per_process_memory_fraction(1.0)  # an engine that could not be made has left its cap
        torch.cuda.empty_cache()
    if peak is not None and peak > budget:
        peak, why = None, f"took {peak} bytes"
    seconds = time.monotonic() - start
    return Trial(budget_nbytes=budget, batch=batch, accumulate=accumulate, peak_nbytes=peak, why=why, seconds=seconds)


def dgc_peak(case: Case, batch: int) -> int:
    build, inputs = partial(by_dgc, case), case.inputs(batch)
    return cuda_peak(build, inputs) if case.device == "cuda" else profiled_peak(partial(trained, build, inputs))


def cuda_peak(build: Callable[[], Training], inputs: tuple[Tensor, ...]) -> int:
    """Of the steps, with all that was made before them."""
    training = build()
    meter = the_cuda_peak()
    meter.restart()
    for _ in range(STEPS):
        training.step(*inputs)
    peak = meter.nbytes()
    if training.engine is not None:
        training.engine.close()
    return peak


def engine_peak(build: Callable[[], Training], inputs: tuple[Tensor, ...]) -> int:
    """Of the device tier where both tiers are the CPU's memory: what the ledger has before a step, and what the profiler
    sees made in it. So tests/chunks/meter/test_cpu.py does it, which holds the ledger to this figure."""
    engine = trained(build, inputs).engine
    engine._run.wait()
    collect()
    before = engine.ledger.total_nbytes + sum(each.nbytes for each in inputs)
    return int(before + profiled_peak(lambda: engine.step(*inputs)))


def trained(build: Callable[[], Training], inputs: tuple[Tensor, ...]) -> Training:
    training = build()
    for _ in range(STEPS):
        training.step(*inputs)
    return training


def collect() -> None:
    """Twice: an engine's end lets go of more that is in cycles."""
    gc.collect()
    gc.collect()


the_cuda_peak = cache(CudaPeak)


def clock(seconds: float) -> Callable[[], bool]:
    start = time.monotonic()
    return lambda: time.monotonic() - start > seconds


PARTS = {"exchange": exchange, "step": step, "batch": batch}

if __name__ == "__main__":
    part, contender, case, given, seconds = sys.argv[1:]
    begin = time.monotonic()
    found = PARTS[part](contender, Case(**json.loads(case)), json.loads(given), float(seconds))
    print("\n" + json.dumps({"built_s": time.monotonic() - begin, **found}), flush=True)
    os._exit(0)  # gloo has been seen to abort when it is taken apart
