"""The contenders of `make bench-memory`: each makes a training step of a case."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import scrimp
from bench.gpu.cases import ACTIVATIONS
from bench.memory.case import DENSITY, Case
from bench.memory.dgc import Dgc
from bench.network.contenders import BY_DDP, FP16, FP32, POWER

PLAIN, DGC, SCRIMP = "SGD alone, no exchange", "DGC layout", "scrimp"
ROOM_NBYTES = 1 << 30  # no cap is less, where none is asked for: allocators have segments


@dataclass(frozen=True, kw_only=True)
class Training:
    """`engine`: where it is scrimp's."""

    step: Callable[..., Tensor]
    engine: Any = None


@dataclass(frozen=True, kw_only=True)
class Contender:
    """`most`: what it may take in multiples of the weights, if that is asked. `sparse`: how scrimp exchanges; None: densely."""

    build: Callable[[Case], Training]
    most: float | None = None
    ddp: bool = False
    sparse: Mapping[str, str] | None = field(default=None)


def by_torch(make: Callable[[Any], nn.Module], case: Case) -> Training:
    """Gradients go after every step, as is torch's own custom."""
    model = make(case)
    optimizer = SGD(model.parameters(), case.rate, case.momentum)

    def step(*batch: Tensor) -> Tensor:
        loss: Tensor = model(*_there(case, batch))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Training(step=step)


def by_dgc(case: Case) -> Training:
    """Nothing is recomputed, nothing is off the device: bf16 weights and gradients where asked for, the rest in fp32."""
    model = case.model()
    dgc = Dgc(model, lr=case.rate, momentum=case.momentum, density=DENSITY, dtype=case.dtype)

    def step(*batch: Tensor) -> Tensor:
        loss: Tensor = model(*_there(case, batch))
        loss.backward()  # type: ignore[no-untyped-call]
        dgc.step()
        return loss.detach()

    return Training(step=step)


def by_scrimp(
    case: Case,
    *,
    sparse: Mapping[str, str] | None,
    budget_nbytes: int | None = None,
    recompute: str = "auto",
    accumulate: int = 1,
) -> Training:
    """Without a budget there is room for everything several times over: what is off the device is there because it was asked."""
    exchange = {} if sparse is None else {"exchange": scrimp.Sparse(density=DENSITY, **sparse)}  # type: ignore[arg-type]
    engine = scrimp.Engine(
        case.model("meta"),
        optimizer=scrimp.SGD(lr=case.rate, momentum=case.momentum),
        memory=scrimp.Memory(device=budget_nbytes or max(ROOM_NBYTES, 8 * case.weights_nbytes())),
        precision=case.precision,
        activations=ACTIVATIONS[recompute],
        micro_batches=accumulate,
        device=case.device,
        **exchange,
    )
    return Training(step=engine.step, engine=engine)


def _there(case: Case, batch: tuple[Tensor, ...]) -> list[Tensor]:
    """Copied even on the CPU: a batch comes from elsewhere."""
    return [each.to(case.device, case.dtype if each.is_floating_point() else each.dtype, copy=True) for each in batch]


def _ddp(case: Case) -> nn.Module:
    return DistributedDataParallel(case.model())


def _sparse(most: float, residual: str, place: str) -> Contender:
    sparse = {"residual": residual, "place": place}
    return Contender(build=partial(by_scrimp, sparse=sparse), most=most, sparse=sparse)


CONTENDERS = {  # all of the three DDPs of the network's benchmark have gradients that are views of buckets
    PLAIN: Contender(build=partial(by_torch, Case.model)),
    "DDP": Contender(build=partial(by_torch, _ddp), ddp=True),
    "DDP, bucket view": Contender(build=partial(by_torch, BY_DDP[FP32]), ddp=True),
    "DDP, bucket view, fp16": Contender(build=partial(by_torch, BY_DDP[FP16]), ddp=True),
    "DDP, bucket view, PowerSGD rank 1": Contender(build=partial(by_torch, BY_DDP[POWER]), ddp=True),
    DGC: Contender(build=by_dgc),
    "scrimp, dense": Contender(build=partial(by_scrimp, sparse=None)),
    "scrimp, fp32 residual": _sparse(1.15, "fp32", "device"),
    "scrimp, bf16 residual": _sparse(0.65, "bf16", "device"),
    "scrimp, int8 residual": _sparse(0.4, "int8", "device"),
    "scrimp, fp32 residual on the host": _sparse(0.15, "fp32", "host"),
}
WHOLE = {"residual": "fp32", "place": "host"}  # of whole steps: what takes the least of the device
