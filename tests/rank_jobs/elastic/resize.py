"""What ranks do in the tests of `engine.resize`."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from scrimp import SGD, AdamW, Engine, Memory, Progress, Sparse, zoo
from scrimp.errors import ScrimpError
from tests.rank_jobs.planned_engine import engine_of

ROWS = 24  # of a global batch: for 1, 2, 3 and 4 ranks, in two micro-batches
Phase = tuple[tuple[int, ...], int]  # members, and steps


def shares(name: str, members: tuple[int, ...], step: int) -> list[torch.Tensor]:
    """This rank's rows of a global batch."""
    place = members.index(dist.get_rank())
    return [tensor.chunk(len(members))[place] for tensor in zoo.example_batch(name, batch=ROWS, step=step)]


def built(name: str, group: Any, optimizer: str, seed: int = 0, **settings: Any) -> Engine:
    torch.manual_seed(seed)
    spec: Any = {
        "adamw": AdamW(lr=1e-2, eps=1e-4), "int8": AdamW(lr=1e-2, eps=1e-4, state="int8"), "sgd": SGD(lr=0.1, momentum=0.9),
    }[optimizer]  # fmt: skip
    settings = {"precision": "fp32", "chunk_numel": 3000, **settings}
    return Engine(zoo.build(name), optimizer=spec, memory=Memory(device="1GiB"), device="cpu", group=group, **settings)


def run(engine: Engine, name: str, members: tuple[int, ...], steps: range) -> list[float]:
    return [float(engine.step(*shares(name, members, step))) for step in steps]


def whole(engine: Engine) -> dict[str, torch.Tensor]:
    """Everything that the next step depends on: masters, states, counters, buffers, settings."""
    run = engine._run
    state = {f"{key}.master": value.clone() for key, value in engine.iter_state()}
    for index, layer in enumerate(run.store.table.layers):
        for slot in layer.slots:
            for k, field in enumerate(run.store.optimizer.fields):
                full = torch.zeros(field.numel(slot.numel))
                with run.store.opened(index) as data:
                    for piece in data.pieces(slot):
                        full[field.span(piece.inside)] = piece.states[k].float()
                state[f"{slot.name}.{k}"] = run.wire.sum(full)
    counts = [run.counts.get(name, 0) for name in run.weights]
    return {**state, "counters": torch.tensor([run.steps, run.skipped, *counts]), "lr": torch.tensor(engine.lr)}


def resized(name: str, phases: list[Phase], optimizer: str, settings: dict, folder: str) -> list[str]:
    """Trains in phases of other ranks each. After every resize all that the next steps depend on, and what they give, is compared
    with an engine of the same ranks that loaded the checkpoint written before. Returns what differs."""
    wrong: list[str] = []
    rank, step, before = dist.get_rank(), 0, None
    engine = built(name, [*phases[0][0]], optimizer, **settings)
    for number, (members, steps) in enumerate(phases):
        if number:
            engine.resize([*members])
        now = range(step, step + steps)
        step += steps
        other = built(name, [*members], optimizer, seed=number, **settings)
        if rank not in members:
            held = engine.ledger.host.total_nbytes + sum(engine.ledger.device.now[kind] for kind in ("parameters", "optimizer"))
            wrong += [f"phase {number}: rank {rank} holds {held} bytes"] if held else []
        else:
            if before is not None:
                other.load(before)
                wrong += _differ(f"phase {number}, before", whole(engine), whole(other))
                engine.lr = other.lr = 0.01 * (number + 1)  # for later ranks to hear of
            torch.manual_seed(number)
            losses = run(engine, name, members, now)
            torch.manual_seed(number)
            theirs = run(other, name, members, now) if before is not None else losses
            wrong += [f"phase {number}: {losses} is not {theirs}"] if losses != theirs else []
            if before is not None:
                wrong += _differ(f"phase {number}, after", whole(engine), whole(other))
            before = Path(folder) / f"phase-{number}"
            engine.save(before)
        before = Path(folder) / f"phase-{number}"
        dist.barrier()
    return wrong


def _differ(when: str, one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [f"{when}: {key}" for key, value in one.items() if not torch.equal(value, other[key])]


class Exact(nn.Module):
    """Whose sums are exact in fp32 in any order: of small integers, with gradients that do not depend on the weights. With
    momentum 1 weights are whole multiples of a rank's share of 1 for ever; `exact_batch` has a power of two of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(48, 40) for _ in range(3))
        for part in self.parts:
            nn.init.zeros_(part.weight)
            nn.init.zeros_(part.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(part(x) for part in self.parts).sum(1).mean()


def exact_batch(step: int) -> torch.Tensor:
    return torch.randint(-1, 2, (32, 48), generator=torch.Generator().manual_seed(step)).float()


def exact(phases: list[Phase]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The mean losses over the ranks, and the weights, after phases of other ranks each."""
    engine = Engine(
        Exact(), optimizer=SGD(lr=1.0, momentum=1.0), precision="fp32", memory="1GiB", device="cpu", chunk_numel=256,
        group=[*phases[0][0]],
    )  # fmt: skip
    losses, step, state = [], 0, {}
    for number, (members, steps) in enumerate(phases):
        if number:
            engine.resize([*members])
        for _ in range(steps):
            loss = torch.zeros(())
            if dist.get_rank() in members:
                mine = exact_batch(step).chunk(len(members))[members.index(dist.get_rank())]
                loss = engine.step(mine) / len(members)
            dist.all_reduce(loss)
            losses.append(float(loss))
            step += 1
        state = {key: value.clone() for key, value in engine.iter_state()} if dist.get_rank() in members else {}
    return losses, state


def bytes_held(name: str, phases: list[tuple[int, ...]], settings: dict) -> list[tuple[int, int, int, int, int, int]]:
    """For every resize: the host's share before, afterwards, at the peak; the smaller share of the largest tensor of a layer;
    bytes of a chunk; and what the ledger counts that no tensor of a placement is."""
    engine, found = built(name, [*phases[0]], "adamw", **settings), []
    run(engine, name, phases[0], range(3)) if dist.get_rank() in phases[0] else None
    for old, new in itertools.pairwise(phases):
        store, host = engine._run.store, engine.ledger.host
        before = _share(engine, old)
        host.reset_peak()
        engine.resize([*new])
        after = _share(engine, new)
        numel = max(layer.numel for layer in store.table.layers)
        chunk = 4 * store.table.capacity
        kept = sum(tensor.nbytes for placement in store.placements for tensor in placement.tensors)
        largest = 4 * -(-numel // max(len(old), len(new)))
        found.append((before, after, host.peak_nbytes, largest, chunk, host.total_nbytes - kept))
    return found


def _share(engine: Engine, members: tuple[int, ...]) -> int:
    """All model data of this rank, if it were on the host."""
    store = engine._run.store
    if dist.get_rank() not in members:
        return 0
    return sum(sum(store.placement_nbytes(layer)) for layer in range(len(store.placements)))


def refused(folder: str) -> list[str]:
    """What each misuse says, in order."""
    rank, said = dist.get_rank(), []

    def tried(make: Any) -> None:
        try:
            make()
        except ScrimpError as error:
            said.append(f"{type(error).__name__}: {error}")
        else:
            said.append("nothing")

    engine = built("gpt-tiny", [0, 1], "adamw")
    batch = zoo.example_batch("gpt-tiny", batch=2)
    if rank > 1:
        for call in (lambda: engine.step(*batch), engine.state_dict, lambda: engine.save(folder), lambda: engine.load(folder)):
            tried(call)
        engine.report(Path(folder) / "report.html")  # is rank 0's
        with Progress(engine, metrics=Path(folder) / f"metrics-{rank}.jsonl", quiet=True):
            said.append(str(sorted(path.name for path in Path(folder).iterdir())))
    dist.barrier()
    tried(lambda: engine.resize([0, 1] if rank < 3 else [0, 2]))
    tried(lambda: engine.resize([0, 4]))
    tried(lambda: engine.resize([]))
    tried(lambda: engine.resize([0, 1, 2] if rank else [0, 1, 1]))
    if rank < 2:
        engine.step(*batch)
    other = built("gpt-tiny", [0, 1], "adamw" if rank != 2 else "sgd")
    tried(lambda: other.resize([0, 1, 2]))
    if rank < 2:
        other.step(*batch)  # nothing has changed
    sparse = Engine(zoo.build("gpt-tiny"), optimizer=SGD(lr=0.1), exchange=Sparse(density=0.5), memory="1GiB", device="cpu")
    tried(lambda: sparse.resize([0, 1]))
    sparse.close()
    tried(lambda: Engine(zoo.build("gpt-tiny"), optimizer=SGD(lr=0.1), exchange=Sparse(density=0.5), device="cpu", group=[0]))
    disk = Engine(zoo.build("gpt-tiny"), memory=Memory(device="1GiB", disk=folder), device="cpu")
    tried(lambda: disk.resize([0, 1]))
    engine.close()
    tried(lambda: engine.resize([0, 1, 2]))
    return said


def crossed() -> str:
    """Rank 1 steps where the others resize."""
    engine = built("gpt-tiny", [0, 1, 2], "adamw")
    try:
        if dist.get_rank() == 1:
            engine.step(*zoo.example_batch("gpt-tiny", batch=2))
        else:
            engine.resize(None)
    except ScrimpError as error:
        return str(error)
    return ""


def planned(plan: str) -> str:
    engine = engine_of(plan, "gpt-tiny", {})
    try:
        engine.resize([0])
    except ScrimpError as error:
        return str(error)
    return ""


def groups_of_torch() -> list[tuple[int, ...]]:
    """A process group that torch made, then all ranks."""
    pair = dist.new_group([1, 3])
    engine, found = built("gpt-tiny", pair, "adamw"), []
    for group in (None, pair, [2]):
        engine.resize(group)
        found.append(engine._run.group.members)
    if dist.get_rank() == 2:
        engine.step(*zoo.example_batch("gpt-tiny", batch=2))
    return found


def random_states(same: bool) -> tuple[list[int], list[int]]:
    """Numbers that the ranks draw after ranks 2 and 3 have joined, and after the same once more."""
    found = []
    for _ in range(2):
        engine = built("gpt-tiny", [0, 1], "adamw")
        torch.manual_seed(7 if same else dist.get_rank())
        if dist.get_rank() > 1:
            torch.seed()
        engine.resize(None)
        mine = torch.randint(1 << 40, (1,))
        rows = [torch.empty_like(mine) for _ in range(4)]
        dist.all_gather(rows, mine)
        found.append([int(row) for row in rows])
    return found[0], found[1]


def host_too_small() -> tuple[str, bool]:
    """Rank 0's host has no room for what four ranks hold: an error on all ranks, and training goes on as it was."""
    engine = built("gpt-tiny", None, "adamw")
    everyone = (0, 1, 2, 3)
    run(engine, "gpt-tiny", everyone, range(1))
    before, alone = whole(engine), engine._run.alone
    share = sum(sum(engine._run.store.placement_nbytes(k)) for k in range(len(engine._run.store.placements)))
    engine._run.alone = replace(alone, budget=replace(alone.budget, host_nbytes=3 * share))
    try:
        engine.resize([0])
    except ScrimpError as error:
        same = not _differ("", whole(engine), before)
        run(engine, "gpt-tiny", everyone, range(1, 3))
        return f"{type(error).__name__}: {error}", same
    return "", False
