"""Sparse gradient exchange for `DistributedDataParallel`: a communication hook with top-k selection and error feedback.

    state = SparseState(model, density=0.01, momentum=0.9)
    model.register_comm_hook(state, sparse_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)     # no momentum: it is in the state

The optimizer's gradient is the mean of the entries that the ranks sent, the same on all ranks. Unsent entries stay in a residual.
"""

import zlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from scrimp.chunks import DTYPES as VALUES
from scrimp.errors import RunError
from scrimp.exchange import (
    PRESENT,
    Bucket,
    ErrorFeedback,
    Momentum,
    all_finite,
    average_onto,
    density_at,
    finite,
    plan_bucket,
    put_part,
    row_error,
    seal,
    select_topk,
    unpack,
)
from scrimp.exchange import residual as make_residual
from scrimp.move import all_gather_flat


class SparseState:
    """`density`: share of the entries that are sent; over `warm_up` steps it falls to this from a quarter. `values`: dtype of
    sent entries, "bf16", "fp16" or "fp32". `residual`: dtype of the residual, "fp32", "bf16" or "int8". `momentum` replaces the
    optimizer's; `masking` clears it where an entry was sent. Tensors of less than `small` elements are sent dense."""

    def __init__(
        self,
        model: nn.Module,
        *,
        density: float = 0.01,
        momentum: float = 0.9,
        masking: bool = True,
        warm_up: int = 0,
        values: str = "bf16",
        residual: str = "fp32",
        small: int = 4096,
        group: Any = None,
    ) -> None:
        if not 0 < density <= 1:
            raise RunError(f"density={density!r} is out of range: more than 0, at most 1")
        if values not in VALUES:
            raise RunError(f"values={values!r} is not possible; there are {', '.join(map(repr, VALUES))}")
        if not 0 <= momentum < 1:
            raise RunError(f"momentum={momentum!r} is out of range: from 0 to below 1")
        module = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        self.names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._shapes = {name: (parameter.numel(), parameter.device) for name, parameter in module.named_parameters()}
        self.density, self.momentum, self.masking, self.warm_up = density, momentum, masking, warm_up
        self.values, self.residual, self.small, self.group = VALUES[values], residual, small, group
        self.step = 0
        self.kept: dict[str, ErrorFeedback] = {}
        self.after: dict[str, torch.Tensor] = {}  # momentum of dense tensors: after the exchange, the same on all ranks

    @property
    def now(self) -> float:
        """The density of this step."""
        return density_at(self.step, self.density, self.warm_up)

    def of(self, name: str) -> ErrorFeedback:
        if name not in self.kept:
            numel, device = self._shapes[name]
            seed = (dist.get_rank(self.group) << 32) + zlib.crc32(name.encode())
            rest = make_residual(self.residual, numel, device, seed)
            states = [torch.zeros(numel, device=device)] if self.momentum else []
            rule = Momentum(momentum=self.momentum)
            self.kept[name] = ErrorFeedback(rule=rule, states=states, rest=rest, numel=numel, masking=self.masking)
        return self.kept[name]

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank, by parameter; every rank has its own."""
        kept = {
            name: {
                **dict(zip(["momentum"], kept.states, strict=False)),
                **{f"residual.{key}": tensor for key, tensor in kept.rest.tensors.items()},
            }
            for name, kept in self.kept.items()
        }
        return {"step": self.step, "residual": self.residual, "kept": kept, "after": self.after}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["residual"] != self.residual:
            raise RunError(f"the state has its residual in {state['residual']}, but this SparseState keeps {self.residual}")
        unknown = {*state["kept"], *state["after"]} - {*self._shapes}
        if unknown:
            raise RunError(f"the state has {', '.join(sorted(unknown)[:5])}, which the model does not have")
        self.step = state["step"]
        for name, tensors in state["kept"].items():
            kept = self.of(name)
            for u in kept.states:
                u.copy_(tensors["momentum"])
            for key, tensor in kept.rest.tensors.items():
                tensor.copy_(tensors[f"residual.{key}"])
        self.after = {name: tensor.clone() for name, tensor in state["after"].items()}

    def pushed(self, name: str, mean: torch.Tensor) -> torch.Tensor:
        """A densely sent mean, with the state's momentum applied."""
        if not self.momentum:
            return mean
        before = self.after.get(name)
        self.after[name] = mean.clone() if before is None else before.mul_(self.momentum).add_(mean)
        return self.after[name]


def sparse_hook(
    state: SparseState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # DDP inspects annotations, so they are not strings here
) -> torch.futures.Future[torch.Tensor]:
    """The hook for `DistributedDataParallel.register_comm_hook`."""
    buffer: torch.Tensor = bucket.buffer()
    gradients: list[torch.Tensor] = bucket.gradients()
    names = [state.names[id(parameter)] for parameter in bucket.parameters()]
    sizes = tuple((name, gradient.numel()) for name, gradient in zip(names, gradients, strict=True))
    plan = _planned(sizes, state.now, state.values, state.small)
    flats = [gradient.reshape(-1) for gradient in gradients]  # in place, unless the gradient is not contiguous
    step, world = state.step, dist.get_world_size(state.group)
    state.step += bucket.is_last()
    sound = finite(buffer)
    row, sent = plan.row(buffer.device), []
    for part, flat in zip(plan.parts if sound else (), flats, strict=False):
        if part.how is None or part.how.everything:
            positions = None if part.how is None else select_topk(flat, part.how)
            put_part(row, part, positions, flat, state.values)
            continue
        rate = 1.0  # the optimizer applies the learning rate
        state.of(part.name).send_into(row[part.start : part.stop], flat, part.how, state.values, rate)
        row[part.flag].fill_(PRESENT)
        sent.append(part)
    seal(row, step, finite=sound)
    rows = row.new_empty(world * row.numel())
    work = all_gather_flat(rows, row, state.group, async_op=True)

    def arrived(_: Any) -> torch.Tensor:
        came = rows.view(world, -1)
        _check(came, plan, step)
        if not all_finite(came):  # NaN gradients on every rank; the sent entries return to the residual
            for part in sent:
                assert part.how is not None
                state.of(part.name).give_back(*unpack(row[part.start : part.stop], part.how, state.values))
            return buffer.fill_(float("nan"))
        means = {
            part.name: flat if flat.dtype == torch.float32 else flat.float() for part, flat in zip(plan.parts, flats, strict=True)
        }
        trouble = average_onto(came, plan, lambda part: means[part.name].zero_())
        if trouble is not None:
            raise RunError(f"step {step}: {trouble}")
        for part, gradient in zip(plan.parts, gradients, strict=True):
            mean = state.pushed(part.name, means[part.name]) if part.whole else means[part.name]
            if mean.data_ptr() != gradient.data_ptr():
                gradient.copy_(mean.view(gradient.shape))
        return buffer

    future: torch.futures.Future[torch.Tensor] = work.get_future().then(arrived)
    return future


_planned = lru_cache(maxsize=256)(plan_bucket)  # the same in every step, except in the warm-up


def _check(came: torch.Tensor, plan: Bucket, step: int) -> None:
    for rank in range(came.shape[0]):
        trouble = row_error(came[rank], step)
        if trouble is not None:
            raise RunError(f"step {step}, {plan.parts[0].name} to {plan.parts[-1].name}: the packet of rank {rank} {trouble}")
