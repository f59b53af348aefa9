"""What ranks do in the tests of the engine."""

from __future__ import annotations

import copy
import os
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from scrimp import zoo
from scrimp.chunks.tables.optimizers import SGD, AdamW
from scrimp.engine import Engine, Memory
from scrimp.errors import FitError, RunError
from tests.support import bounds


def train(
    name: str, steps: int, optimizer: str, settings: dict, device: str = "1GiB", on: str = "cpu"
) -> tuple[dict, int, int, int]:
    """This rank's share of global batches of 8; the weights, peak on the device, bytes on the host, budget."""
    torch.manual_seed(dist.get_rank())  # rank 0's weights count
    model = zoo.build(name)
    spec = AdamW(lr=1e-2, eps=1e-4) if optimizer == "adamw" else SGD(lr=0.1, momentum=0.9)
    engine = Engine(model, optimizer=spec, memory=Memory(device=device), device=on, **settings)
    world, rank = dist.get_world_size(), dist.get_rank()
    for step in range(steps):
        batch = zoo.example_batch(name, batch=8, step=step)
        engine.step(*(tensor.chunk(world)[rank] for tensor in batch))
    state = dict(engine.iter_state())
    assert engine.state_dict().keys() == (state.keys() if rank == 0 else set())
    return state, engine.ledger.peak_nbytes, engine._run.store.host_nbytes(), engine._run.budget.device_nbytes


def host_at_first(name: str) -> int:
    """Bytes on this rank's host when the engine is built."""
    return Engine(zoo.build(name), memory=Memory(device="1GiB"), device="cpu")._run.store.host_nbytes()


def same_on_disk(name: str, steps: int, settings: dict, folder: str) -> tuple[int, bool]:
    """How many layers have their states on disk, in tiles of 1024 elements, and whether that changes a bit."""
    names = ("spill.file.BLOCK", "store.disk_tier.BLOCK", "spill.queue.REQUEST")
    with ExitStack() as stack:
        for constant in names:
            stack.enter_context(patch(f"scrimp.chunks.{constant}", 4096))
        stack.enter_context(patch("scrimp.chunks.store.disk_tier.TILE", 1024))
        states, places, host = [], [], 0
        for disk in (None, folder):
            torch.manual_seed(0)
            memory = Memory(device="1GiB", host=host or "auto", disk=disk)
            engine = Engine(zoo.build(name), optimizer=AdamW(lr=1e-2), memory=memory, device="cpu", **settings)
            engine._run.planning._on_device = frozenset()
            rows = [engine._run.store.placement_nbytes(k) for k in range(len(engine._run.store.placements))]
            host = dist.get_world_size() * (sum(row[0] + row[1] for row in rows) + max(row[2] for row in rows))
            world, rank = dist.get_world_size(), dist.get_rank()
            for step in range(steps):
                engine.step(*(tensor.chunk(world)[rank] for tensor in zoo.example_batch(name, batch=8, step=step)))
            states.append(dict(engine.iter_state()))
            places = [placement.tier for placement in engine._run.store.placements]
            assert engine.ledger.host.peak_nbytes <= engine._run.store.host_room_nbytes
    return places.count("disk"), all(torch.equal(states[1][key], value) for key, value in states[0].items())


def plain(name: str, steps: int, optimizer: str, clip: float | None) -> dict:
    """One process, plain PyTorch, the same global batches."""
    torch.manual_seed(0)
    model = copy.deepcopy(zoo.build(name))
    if optimizer == "adamw":
        update: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, fused=True)
    else:
        update = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    for step in range(steps):
        model(*zoo.example_batch(name, batch=8, step=step)).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        update.step()
        update.zero_grad()
    return model.state_dict()


def alongside(
    name: str, steps: int, optimizer: str, settings: dict
) -> tuple[dict[str, torch.Tensor], int, int, int, dict[str, float]]:
    """A model of the zoo, with PyTorch's data parallel beside it: `beside_ddp`."""
    batches = [zoo.example_batch(name, batch=8, step=step) for step in range(steps)]
    return beside_ddp(lambda: zoo.build(name), batches, optimizer, settings)


def beside_ddp(
    build: Callable[[], nn.Module], batches: list, optimizer: str, settings: dict
) -> tuple[dict[str, torch.Tensor], int, int, int, dict[str, float]]:
    """As `train`, with PyTorch's data parallel beside it. In every step it begins with the engine's weights, and its gradients
    go through the optimizer's formulas in fp64. What `train` gives, and for each tensor the engine's largest error as a multiple
    of its bound."""
    world, rank, accumulate = dist.get_world_size(), dist.get_rank(), settings.get("micro_batches", 1)
    torch.manual_seed(rank)  # rank 0's weights count
    spec = AdamW(lr=1e-2, eps=1e-4) if optimizer == "adamw" else SGD(lr=0.1, momentum=0.9)
    engine = Engine(build(), optimizer=spec, memory=Memory(device="1GiB"), device="cpu", **settings)
    model = build()
    parallel = DistributedDataParallel(model)
    parameters = dict(model.named_parameters())
    rules = {key: bounds.Adam(eps=1e-4) if optimizer == "adamw" else bounds.Momentum() for key in parameters}
    worst = dict.fromkeys(model.state_dict(), 0.0)
    state = {key: value.clone() for key, value in engine.iter_state()}
    for step, whole in enumerate(batches):
        batch = [tensor.chunk(world)[rank] for tensor in whole]
        parts = [*zip(*(tensor.chunk(accumulate) for tensor in batch), strict=True)]
        model.load_state_dict(state)
        sizes = dict.fromkeys(parameters, 0.0)
        for part in parts:
            model.zero_grad()
            with parallel.no_sync():
                parallel(*part).backward()
            for key, total in _sums({key: parameter.grad.abs() for key, parameter in parameters.items()}).items():
                sizes[key] += total / (world * accumulate)
        model.load_state_dict(state)  # buffers too
        model.zero_grad()
        for k, part in enumerate(parts):
            with parallel.no_sync() if k < accumulate - 1 else nullcontext():
                (parallel(*part) / accumulate).backward()
        before, _ = state, engine.step(*batch)
        state = {key: value.clone() for key, value in engine.iter_state()}
        scale, clip = 1.0, settings.get("clip_norm")
        if clip is not None:
            norm = float(torch.cat([parameter.grad.double().flatten() for parameter in parameters.values()]).norm())
            limit = bounds.gamma(sum(parameter.numel() for parameter in parameters.values()) + world)
            assert abs(engine.optimizer.norm - norm) <= limit * norm, (engine.optimizer.norm, norm)
            scale = min(1.0, clip / (engine.optimizer.norm + 1e-6))
        for key, parameter in parameters.items():
            # DDP's sum over ranks has its roundings, and the engine's has others.
            error = 2 * scale * bounds.mean_error(world * accumulate, sizes[key])
            rules[key].add(scale * parameter.grad.double(), error)
            update, off = rules[key].update(spec.lr, step + 1)
            kept = before[key].double() * (1 - spec.lr * spec.weight_decay)
            bound = off + bounds.gamma(3) * (kept.abs() + update.abs())
            worst[key] = max(worst[key], bounds.excess(state[key], kept - update, bound))
        theirs = dict(model.named_buffers())
        for key, buffer in theirs.items():
            dist.broadcast(buffer, src=0)
            if key in state and not torch.equal(state[key], buffer):
                worst[key] = float("inf")
    return state, engine.ledger.peak_nbytes, engine._run.store.host_nbytes(), engine._run.budget.device_nbytes, worst


def _sums(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Over all ranks, in one collective."""
    total = torch.cat([tensor.double().flatten() for tensor in tensors.values()])
    dist.all_reduce(total)
    parts = total.split([tensor.numel() for tensor in tensors.values()])
    return {key: part.view(tensor.shape) for (key, tensor), part in zip(tensors.items(), parts, strict=True)}


def save_after(name: str, steps: int, settings: dict, folder: str, state: str = "fp32") -> None:
    torch.manual_seed(0)
    optimizer = AdamW(lr=1e-2, state=state)
    engine = Engine(zoo.build(name), optimizer=optimizer, memory=Memory(device="1GiB"), device="cpu", **settings)
    world, rank = dist.get_world_size(), dist.get_rank()
    for step in range(steps):
        engine.step(*(tensor.chunk(world)[rank] for tensor in zoo.example_batch(name, batch=8, step=step)))
    engine.save(folder)


def load_state(name: str, settings: dict, folder: str, state: str = "fp32") -> dict:
    """Load, and everything that a next step depends on: masters and states."""
    torch.manual_seed(1)
    optimizer = AdamW(lr=1e-2, state=state)
    engine = Engine(zoo.build(name), optimizer=optimizer, memory=Memory(device="1GiB"), device="cpu", **settings)
    engine.load(folder)
    state = {f"{key}.master": value for key, value in engine.iter_state()}
    for index, layer in enumerate(engine._run.store.table.layers):
        for slot in layer.slots:
            for k, field in enumerate(engine._run.store.optimizer.fields):
                full = torch.zeros(field.numel(slot.numel))
                with engine._run.store.opened(index) as data:
                    for piece in data.pieces(slot):
                        full[field.span(piece.inside)] = piece.states[k].float()
                state[f"{slot.name}.{k}"] = engine._run.wire.sum(full)
    state["steps"] = torch.tensor(engine.optimizer.steps)
    return state


def fault(kind: str) -> str:
    """One thing goes wrong on rank 1; what this rank saw."""
    torch.manual_seed(0)
    engine = Engine(zoo.build("gpt-tiny"), optimizer=SGD(lr=0.1), memory=Memory(device="1GiB"), device="cpu", precision="fp32")
    rank = dist.get_rank()
    batch = zoo.example_batch("gpt-tiny", batch=2, step=0)
    engine.step(*batch)
    before = dict(engine.iter_state())
    if kind == "nan":
        if rank == 1:
            place = engine._run.store.receive

            def poison(layer: int, slot: object, gradient: torch.Tensor, *, first: bool) -> None:
                spoiled = gradient * float("nan") if getattr(slot, "name", "") == "blocks.1.norm1.weight" else gradient
                place(layer, slot, spoiled, first=first)  # type: ignore[arg-type]

            engine._run.store.receive = poison  # type: ignore[method-assign]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine.step(*batch)
        same = all(torch.equal(value, before[name]) for name, value in engine.iter_state())
        words = [str(w.message) for w in caught if "not finite" in str(w.message)]
        return f"skipped={engine.optimizer.skipped} same={same} {words}"
    try:
        for _ in range(50):
            if rank == 1:
                if kind == "dead":
                    os._exit(9)
                time.sleep(8)
            engine.step(*batch)
    except RunError as error:
        return str(error)
    return "no error"


def weights_of(name: str, weights: str) -> dict:
    """Built on meta from a file; a state dict would be rank 0's."""
    with torch.device("meta"):
        model = zoo.build(name)
    engine = Engine(model, weights=weights, memory=Memory(device="1GiB"), device="cpu", chunk_numel=1000)
    return {key: value.clone() for key, value in engine.iter_state()}


def within_budgets(tenths: list[int]) -> list[tuple[int, int, int, int, int, int]]:
    """Steps beyond the tracing ones, within so many tenths of the least budget; budget and peak, then the traffic of a step
    and the least of it."""
    world, rank = dist.get_world_size(), dist.get_rank()

    def trained(budget: int, steps: int) -> Engine:
        torch.manual_seed(0)
        model = zoo.build("gpt-tiny", dim=96, layers=4)
        engine = Engine(model, optimizer=AdamW(), memory=Memory(device=budget), device="cpu", precision="fp32")
        for step in range(steps):
            batch = zoo.example_batch("gpt-tiny", batch=8, step=step)
            engine.step(*(tensor.chunk(world)[rank].clone() for tensor in batch))
        return engine

    least = trained(1 << 30, 1).ledger.peak_nbytes
    found = []
    for budget in (least * tenth // 10 for tenth in tenths):
        engine = trained(budget, 4)
        bound = engine.bound()
        moved = (bound.up_nbytes, bound.least_up_nbytes, bound.down_nbytes, bound.least_down_nbytes)
        found.append((budget, engine.ledger.peak_nbytes, *moved))
    return found


def uneven() -> tuple[list[int], int]:
    """Ranks with budgets, and from step to step batches, of their own; the budgets they plan for, and how often they traced."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    memory = Memory(device="1200KiB" if rank == 0 else "600KiB")
    engine = Engine(zoo.build("gpt-tiny"), optimizer=SGD(lr=0.1), memory=memory, device="cpu", precision="fp32")
    draw, traced = torch.Generator().manual_seed(rank), 0
    for _ in range(30):
        size = int(torch.randint(1, 5, (), generator=draw))
        engine.step(*(tensor[:size] for tensor in zoo.example_batch("gpt-tiny", batch=4, step=0)))
        traced += engine._run.current.trace is not None
    return engine._run.wire.every(torch.tensor([engine._run.budget.device_nbytes])).flatten().tolist(), traced


def least_device(name: str, device: str, less: float) -> tuple[int | None, int | None, int | None]:
    """The least device budgets that FitErrors name: with this budget, with the one that the first names, and with less."""
    first = _least_named(name, device)
    assert first is not None
    return first, _least_named(name, first), _least_named(name, int(less * first))


def _least_named(name: str, device: int | str) -> int | None:
    torch.manual_seed(0)
    engine = Engine(zoo.build(name), memory=Memory(device=device), device="cpu")
    try:
        engine.step(*zoo.example_batch(name, batch=4, step=dist.get_rank()))
    except FitError as error:
        return error.least_nbytes
    return None
