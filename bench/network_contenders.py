"""The contenders of `make bench-network`: what each makes of a model, and how many bytes it should then send."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from math import prod

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from bench.network_case import Case

FP32, FP16, POWER, SPARSE = "DDP fp32", "DDP fp16", "DDP PowerSGD rank 1", "scrimp sparse 1 %"
DENSITY = 0.01
ONE_BUCKET_MB = 1024
SMALL = 4096  # elements: scrimp sends less than this whole

Built = tuple[nn.Module, Optimizer]


@dataclass(frozen=True, kw_only=True)
class Contender:
    """`nbytes`: what a rank should send in a step, headers not counted. `missing`: why it cannot take part."""

    build: Callable[[Case], Built]
    nbytes: Callable[[Case], float]
    whole: bool  # sends every gradient whole, so its steps are long and no more of them are needed
    missing: Callable[[], str | None] = lambda: None

    def steps(self, case: Case) -> int:
        return case.steps if self.whole else case.steps * case.longer


def all_reduced(case: Case, nbytes: float) -> float:
    """What a rank sends to have so many bytes summed over all ranks in a ring."""
    return 2 * (case.ranks - 1) / case.ranks * nbytes


def _fp32(case: Case) -> Built:
    model = DistributedDataParallel(case.model(), gradient_as_bucket_view=True)
    return model, SGD(model.parameters(), case.rate, case.momentum)


def _fp16(case: Case) -> Built:
    model, optimizer = _fp32(case)
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)  # type: ignore[operator]
    return model, optimizer


def _power(case: Case) -> Built:
    model = DistributedDataParallel(case.model(), gradient_as_bucket_view=True, bucket_cap_mb=ONE_BUCKET_MB)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP cannot read annotations that are kept as text
        if bucket.index() or not bucket.is_last():
            raise RuntimeError("the gradients are in several buckets: PowerSGD would mix up its calls on gloo")
        return powerSGD_hook.powerSGD_hook(state, bucket)

    model.register_comm_hook(state, hook)
    return model, SGD(model.parameters(), case.rate, case.momentum)


def _power_nbytes(case: Case) -> float:
    """A matrix travels as a column and a row, where that is less than half of it; all in fp32."""
    sizes = [sum(shape) if len(shape) == 2 and 2 * sum(shape) < prod(shape) else prod(shape) for shape in case.shapes()]
    return all_reduced(case, 4 * sum(sizes))


def _sparse(case: Case) -> Built:
    ddp = import_module("scrimp.ext.ddp")
    model = DistributedDataParallel(case.model(), gradient_as_bucket_view=True)
    state = ddp.SparseState(model, density=DENSITY, momentum=case.momentum)
    model.register_comm_hook(state, ddp.sparse_hook)
    return model, SGD(model.parameters(), case.rate)  # the momentum is in the state


def _sparse_nbytes(case: Case) -> float:
    """Entries of 4 bytes, from every rank to every other; what is small goes whole in 16 bits."""
    sizes = [prod(shape) for shape in case.shapes()]
    large, small = sum(n for n in sizes if n >= SMALL), sum(n for n in sizes if n < SMALL)
    return (case.ranks - 1) * 4 * DENSITY * large + all_reduced(case, 2 * small)


def _sparse_missing() -> str | None:
    try:
        ddp = import_module("scrimp.ext.ddp")
    except ImportError as error:
        return str(error)
    absent = [name for name in ("SparseState", "sparse_hook") if not hasattr(ddp, name)]
    return f"scrimp.ext.ddp has no {' and no '.join(absent)}" if absent else None


def _elements(case: Case) -> int:
    return sum(map(prod, case.shapes()))


CONTENDERS = {
    FP32: Contender(build=_fp32, nbytes=lambda case: all_reduced(case, 4 * _elements(case)), whole=True),
    FP16: Contender(build=_fp16, nbytes=lambda case: all_reduced(case, 2 * _elements(case)), whole=True),
    POWER: Contender(build=_power, nbytes=_power_nbytes, whole=False),
    SPARSE: Contender(build=_sparse, nbytes=_sparse_nbytes, whole=False, missing=_sparse_missing),
}
