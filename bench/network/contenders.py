"""The contenders of `make bench-network`: what each makes of a model, and how many bytes it should then send."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod

from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import scrimp
from bench.network.case import Case
from scrimp.ext import ddp

FP32, FP16, POWER, SPARSE = "DDP fp32", "DDP fp16", "DDP PowerSGD rank 1", "DDP, scrimp's sparse hook"
ENGINE, ENGINE_DENSE = "scrimp's engine, sparse", "scrimp's engine, dense"
DENSITY = 0.01
ONE_BUCKET_MB = 1024
SMALL = 4096  # elements: scrimp sends less than this whole
MEMORY = "160MiB"  # of both of scrimp's engines


@dataclass(frozen=True, kw_only=True)
class Training:
    """`step` gives the loss; `weights` are asked for at the end."""

    step: Callable[[Tensor, Tensor], Tensor]
    weights: Callable[[], dict[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Contender:
    """`nbytes`: what a rank should send in a step, headers not counted; None where that is not known beforehand."""

    build: Callable[[Case], Training]
    nbytes: Callable[[Case], float] | None
    whole: bool  # sends every gradient whole, so its steps are long and no more of them are needed
    rate: float = Case.rate  # of those that --tune tries, the one that takes it to the loss in the fewest steps

    def steps(self, case: Case) -> int:
        return case.steps if self.whole else case.steps * case.longer


def all_reduced(case: Case, nbytes: float) -> float:
    """What a rank sends to have so many bytes summed over all ranks in a ring."""
    return 2 * (case.ranks - 1) / case.ranks * nbytes


def _by_ddp(make: Callable[[Case], DistributedDataParallel], case: Case, momentum: float | None = None) -> Training:
    """`momentum`: the optimizer's, if it is not the case's."""
    model = make(case)
    optimizer = SGD(model.parameters(), case.rate, case.momentum if momentum is None else momentum)

    def step(inputs: Tensor, labels: Tensor) -> Tensor:
        loss = cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Training(step=step, weights=lambda: model.module.state_dict())


def _fp32(case: Case) -> DistributedDataParallel:
    return DistributedDataParallel(case.model(), gradient_as_bucket_view=True)


def _fp16(case: Case) -> DistributedDataParallel:
    model = _fp32(case)
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return model


def _power(case: Case) -> DistributedDataParallel:
    model = DistributedDataParallel(case.model(), gradient_as_bucket_view=True, bucket_cap_mb=ONE_BUCKET_MB)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP cannot read annotations that are kept as text
        if bucket.index() or not bucket.is_last():
            raise RuntimeError("the gradients are in several buckets: PowerSGD would mix up its calls on gloo")
        return powerSGD_hook.powerSGD_hook(state, bucket)

    model.register_comm_hook(state, hook)
    return model


def _power_nbytes(case: Case) -> float:
    """A matrix travels as a column and a row, where that is less than half of it; all in fp32."""
    sizes = [sum(shape) if len(shape) == 2 and 2 * sum(shape) < prod(shape) else prod(shape) for shape in case.shapes()]
    return all_reduced(case, 4 * sum(sizes))


def _sparse(case: Case) -> DistributedDataParallel:
    """The momentum is in the state."""
    model = _fp32(case)
    state = ddp.SparseState(model, density=DENSITY, momentum=case.momentum)
    model.register_comm_hook(state, ddp.sparse_hook)
    return model


class _WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(self.model(inputs), labels)


def _engine(case: Case, exchange: scrimp.Dense | scrimp.Sparse) -> Training:
    engine = scrimp.Engine(
        _WithLoss(case.model()),
        optimizer=scrimp.SGD(lr=case.rate, momentum=case.momentum),
        memory=scrimp.Memory(device=MEMORY),
        precision="fp32",
        skip_nonfinite=False,
        exchange=exchange,
        device="cpu",
    )
    return Training(step=engine.step, weights=lambda: dict(engine.iter_state()))


def _sparse_nbytes(case: Case) -> float:
    """Entries of 4 bytes, from every rank to every other; what is small goes whole in 16 bits."""
    sizes = [prod(shape) for shape in case.shapes()]
    large, small = sum(n for n in sizes if n >= SMALL), sum(n for n in sizes if n < SMALL)
    return (case.ranks - 1) * 4 * DENSITY * large + all_reduced(case, 2 * small)


def _gathered_nbytes(case: Case) -> float:
    """As with the hook, but what is small is in the same messages: it goes from every rank to every other."""
    small = sum(n for shape in case.shapes() if (n := prod(shape)) < SMALL)
    return _sparse_nbytes(case) - all_reduced(case, 2 * small) + (case.ranks - 1) * 2 * small


def _elements(case: Case) -> int:
    return sum(map(prod, case.shapes()))


BY_DDP = {FP32: _fp32, FP16: _fp16, POWER: _power}  # models, of any case
CONTENDERS = {
    FP32: Contender(build=partial(_by_ddp, _fp32), nbytes=lambda case: all_reduced(case, 4 * _elements(case)), whole=True),
    FP16: Contender(build=partial(_by_ddp, _fp16), nbytes=lambda case: all_reduced(case, 2 * _elements(case)), whole=True),
    POWER: Contender(build=partial(_by_ddp, _power), nbytes=_power_nbytes, whole=False, rate=0.01),  # no rate took it there
    SPARSE: Contender(build=partial(_by_ddp, _sparse, momentum=0.0), nbytes=_sparse_nbytes, whole=False, rate=0.04),
    ENGINE: Contender(
        build=partial(_engine, exchange=scrimp.Sparse(density=DENSITY)), nbytes=_gathered_nbytes, whole=False, rate=0.04
    ),
    ENGINE_DENSE: Contender(build=partial(_engine, exchange=scrimp.Dense()), nbytes=None, whole=True),
}
