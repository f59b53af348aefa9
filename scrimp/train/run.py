"""`train`: a configuration becomes a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from scrimp.chunks import Optimizer
from scrimp.cluster import Cluster
from scrimp.engine import Engine, Memory, Progress
from scrimp.errors import RunError
from scrimp.exchange import Sparse
from scrimp.ledger import format_nbytes, parse_nbytes
from scrimp.planner import Plan
from scrimp.train.config.resolved import Resolved
from scrimp.train.config.sections import AUTO, NONE, Config
from scrimp.train.config.text import to_toml
from scrimp.train.data.batches import Batches, Split, even_rows, on_meta, planned_rows
from scrimp.train.data.sources import open_data
from scrimp.train.devices import devices_of, rate_of
from scrimp.train.dry import rehearsed
from scrimp.train.flops import flops_of
from scrimp.train.folder import AUTO as RESUME_IF_ANY
from scrimp.train.folder import NEW, PLAN, Start, check_same_order, start_of, write_config
from scrimp.train.loop import Loop, Stopped
from scrimp.train.model.build import Built, model_to_train
from scrimp.train.optimizer import exchange_of, optimizer_of
from scrimp.train.planning import plan_of
from scrimp.train.preflight.check import Finding, findings, line, refuse
from scrimp.train.preflight.machine import machine_of
from scrimp.train.preflight.needs import Shape, needs_of, numels
from scrimp.train.ranks import Ranks, join, restarted
from scrimp.train.schedule import factor_of
from scrimp.train.stop import Stop

GPU_SHARE = 0.9  # of the free memory, as the engine takes it


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """`signal`: the number of the signal that stopped the run, 0 for none. `loss`: of the last step of this process."""

    folder: Path
    steps: int
    signal: int = 0
    checkpoint: Path | None = None
    loss: float | None = None
    first: bool = True


def train(
    resolved: Resolved, *, how: str = NEW, dry_run: bool = False, quiet: bool = False, say: Callable[[str], None] = print
) -> Outcome:
    """Train as the configuration says, on this rank. `how`: NEW begins, RESUME goes on from the newest checkpoint of the run
    folder, AUTO goes on if there is one. `say` prints a line, on rank 0. `dry_run`: plan, rehearsal and preflight alone."""
    config = resolved.config
    ranks = join(config.train.device)
    try:
        with Stop(quiet=not ranks.first) as stop:
            told = say if ranks.first and not quiet else _silent
            return _Run(resolved, ranks, stop, told, quiet).go(RESUME_IF_ANY if restarted() else how, dry_run=dry_run)
    finally:
        ranks.leave()


def _silent(words: str) -> None:
    """Of other ranks than the first."""


class _Run:
    def __init__(self, resolved: Resolved, ranks: Ranks, stop: Stop, say: Callable[[str], None], quiet: bool) -> None:
        self.resolved, self.config = resolved, resolved.config
        self.ranks, self.stop, self.say, self.quiet = ranks, stop, say, quiet
        self.folder = Path(self.config.run.folder)

    def go(self, how: str, *, dry_run: bool) -> Outcome:
        config, ranks = self.config, self.ranks
        self.say(to_toml(self.resolved))
        start = Start(folder=self.folder) if dry_run else self._start(how)
        device = _device(config.train.device)
        built = model_to_train(config.model.name, config.model.settings)
        batches, sample = self._data(built)
        optimizer = optimizer_of(config.optimizer, factor_of(config.schedule, config.train.steps))
        cluster = self._cluster(device)
        elsewhere = cluster if dry_run and config.cluster.name != AUTO else None
        found = self._preflight(built, optimizer, device, start, elsewhere, dry_run=dry_run)
        if not dry_run:
            refuse(found)
        plan = self._plan(built, sample, cluster, optimizer, start)
        if dry_run:
            for words in rehearsed(config, built.model, on_meta(sample, config.train.batch), cluster, plan, optimizer, self.say):
                self.say(words)
            refuse(found)
            return Outcome(folder=self.folder, steps=0, first=ranks.first)
        signal = ranks.mean_and_most(0.0, self.stop.number)[1]
        if signal:  # it came before the first step: there is nothing to save
            return Outcome(folder=self.folder, steps=0, signal=signal, first=ranks.first)
        torch.manual_seed(config.train.seed)
        flops = self._flops(device, sample)
        with self._engine(built, optimizer, plan, device) as engine:
            if plan is None and ranks.world > 1:  # other dropout on every rank; under a plan the program takes care of it
                torch.manual_seed(config.train.seed + 1 + ranks.rank)
            rows = self._rows(engine, plan)
            order = {
                "seed": config.train.seed, "batch": config.train.batch, "seq": self._seq(built) or 0,
                "training": batches.split.training, "held_out": batches.split.held_out,
            }  # fmt: skip
            loop = Loop(
                engine=engine, config=config, batches=batches, rows=rows, order=order, folder=self.folder, ranks=ranks,
                stop=self.stop, tokens=config.train.batch * (self._seq(built) or 0),
            )  # fmt: skip
            if start.checkpoint is not None:
                _load(engine, start.checkpoint, order)
                self.say(f"resumed from {start.checkpoint}: {engine.optimizer.steps} of {config.train.steps} steps are done")
            return self._trained(loop, flops)

    def _trained(self, loop: Loop, flops: tuple[float | None, float | None]) -> Outcome:
        config, engine = self.config, loop.engine
        signal = 0
        progress = Progress(
            engine, steps=config.train.steps, run=self.folder, quiet=self.quiet, every=config.metrics.every, flops=flops[0],
            flops_per_second=flops[1],
        )  # fmt: skip
        try:
            with progress:
                if self.ranks.first:
                    write_config(self.folder, to_toml(self.resolved))
                loop.run(progress)
        except Stopped as stopped:
            signal = stopped.signal
        else:
            if self.ranks.first and config.metrics.tensorboard and loop.saved is not None:
                loop.write_events()
            loop.write_report()
        return Outcome(
            folder=self.folder, steps=loop.steps, signal=signal, checkpoint=loop.saved, loss=loop.loss, first=self.ranks.first
        )

    # Parts, in the order of use.

    def _start(self, how: str) -> Start:
        """Rank 0 decides where the run begins: other machines may not see the same files yet."""
        told: dict[str, Any] = {}
        if self.ranks.first:
            try:
                found = start_of(self.folder, how)
                told["checkpoint"] = None if found.checkpoint is None else str(found.checkpoint)
            except RunError as error:
                told["error"] = str(error)
        told = self.ranks.from_first(told)
        if "error" in told:
            raise RunError(told["error"])
        return Start(folder=self.folder, checkpoint=None if told["checkpoint"] is None else Path(told["checkpoint"]))

    def _seq(self, built: Built) -> int | None:
        return None if self.config.data.function is not None else self.config.data.seq or built.seq

    def _data(self, built: Built) -> tuple[Batches, Any]:
        config = self.config
        if not built.reads and config.data.function is None:
            raise RunError(f"{config.model.name} reads no text: give it samples by [data] function, module:function")
        if built.seq is not None and config.data.seq is not None and config.data.seq > built.seq:
            raise RunError(
                f"[data] seq is {config.data.seq}, and {config.model.name} has positions for {built.seq}: set seq in "
                "[model.settings]"
            )
        samples = open_data(config.data, config.tokenizer.name, self._seq(built), built.vocab, shifted=built.shifted)
        if config.cluster.plan == NONE:
            mine = even_rows(config.train.batch, self.ranks.rank, self.ranks.world)
            if (mine.stop - mine.start) % config.train.micro_batches:
                raise RunError(
                    f"[train] batch is {config.train.batch}, so each of {self.ranks.world} ranks has {mine.stop - mine.start} "
                    f"samples, which {config.train.micro_batches} micro_batches do not divide"
                )
        share = config.validation.share if config.validation.every else 0.0
        split = Split.of(len(samples), share, config.train.batch)
        self.say(f"data: {split.training:,} samples to train on" + (f", {split.held_out:,} held out" if split.held_out else ""))
        return Batches(samples, split, batch=config.train.batch, seed=config.train.seed), samples[0]

    def _preflight(
        self, built: Built, optimizer: Optimizer, device: torch.device, start: Start, elsewhere: Cluster | None, *, dry_run: bool
    ) -> list[Finding]:
        """`elsewhere`: the cluster that a dry run is for; its host memory counts, in place of this machine's."""
        config, ranks = self.config, self.ranks
        disk = None if config.memory.disk is None else Path(config.memory.disk)
        machine = machine_of(self.folder, disk, measure=ranks.local == 0)
        world, here, budget, cuda = ranks.world, ranks.here, _budget(config, device), device.type == "cuda"
        if elsewhere is not None and elsewhere.hardware is not None:
            built_of = elsewhere.hardware
            world, here, cuda = built_of.devices, built_of.devices_per_node, built_of.kind != "CPU"
            budget = _given(config.memory.device, built_of.device_memory_nbytes) if cuda else 0
            machine = replace(machine, host_nbytes=built_of.host_memory_nbytes, shm_nbytes=None)
            self.say(f"the preflight is for {world} {built_of.kind}; disks and torch are those of this machine")
        saves = 1 + (config.train.steps // config.checkpoint.every if config.checkpoint.every else 0)
        there = 0 if start.checkpoint is None else len([*start.checkpoint.parent.glob("step-*/manifest.json")])
        shape = Shape(
            world=world, here=here, device_nbytes=budget, cuda=cuda, host_nbytes=_given(config.memory.host, machine.host_nbytes),
            replicated=config.exchange.kind == "sparse" and config.exchange.mesh is None and config.cluster.plan == NONE,
            disk=disk is not None, saves=saves, keep=config.checkpoint.keep, there=there,
        )  # fmt: skip
        numel, trained = numels(built.model)
        needs = needs_of(numel, trained, config.train.precision, optimizer, shape)
        self.say(f"model: {numel:,} parameters, {format_nbytes(needs.model_nbytes)} of weights, masters and optimizer states")
        found = findings(needs, machine, saving=True, launching=dry_run and ranks.world == 1 and world > 1)
        for each in found:
            self.say(line(each))
        return found

    def _cluster(self, device: torch.device) -> Cluster | None:
        """None where the devices are not known, and nothing needs them."""
        config, ranks = self.config, self.ranks
        return devices_of(config.cluster.name, device, world=ranks.world, here=ranks.here, needed=config.cluster.plan == AUTO)

    def _plan(self, built: Built, sample: Any, cluster: Cluster | None, optimizer: Optimizer, start: Start) -> Plan | None:
        config, ranks = self.config, self.ranks
        batch = on_meta(sample, config.train.batch) if config.cluster.plan == AUTO else None
        earlier = None if start.checkpoint is None else start.folder / PLAN
        return plan_of(config, built.model, batch, cluster, optimizer, ranks, earlier, self.say)

    def _rows(self, engine: Engine, plan: Plan | None) -> slice:
        if plan is None:
            return even_rows(self.config.train.batch, self.ranks.rank, self.ranks.world)
        return planned_rows(engine.batch_part, self.config.train.batch)

    def _flops(self, device: torch.device, sample: Any) -> tuple[float | None, float | None]:
        config = self.config
        rate = rate_of(config.cluster.name, device, config.train.precision)
        if rate is None:
            return None, None
        flops = flops_of(model_to_train(config.model.name, config.model.settings).model, sample)
        return (None if flops is None else flops * config.train.batch), rate * self.ranks.world

    def _engine(self, built: Built, optimizer: Optimizer, plan: Plan | None, device: torch.device) -> Engine:
        config = self.config
        exchange = exchange_of(config.exchange)
        return Engine(
            built.model, weights=config.model.weights, plan=plan, optimizer=optimizer,
            memory=Memory(device=config.memory.device, host=config.memory.host, disk=config.memory.disk),
            precision=config.train.precision, exchange=exchange, clip_norm=config.train.clip_norm,
            mesh=config.exchange.mesh if isinstance(exchange, Sparse) else None, micro_batches=config.train.micro_batches,
            activations=config.train.activations, device=config.train.device,
        )  # fmt: skip


def _load(engine: Engine, checkpoint: Path, order: dict[str, int]) -> None:
    """Values of the configuration count, not those of the checkpoint: a changed weight decay takes effect."""
    settings = [
        {key: value for key, value in group.items() if key not in ("params", "lr")} for group in engine.optimizer.param_groups
    ]
    extra = engine.load(checkpoint)
    for group, given in zip(engine.optimizer.param_groups, settings, strict=True):
        group.update(given)
    check_same_order(extra.get("train", {}).get("order"), order)


def _device(name: str | None) -> torch.device:
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def _budget(config: Config, device: torch.device) -> int:
    """Of one rank on a GPU; 0 on a CPU, whose device is the host."""
    if device.type != "cuda":
        return 0
    return _given(config.memory.device, int(torch.cuda.mem_get_info(device)[0] * GPU_SHARE))


def _given(size: int | str, otherwise: int) -> int:
    return otherwise if size == AUTO else parse_nbytes(size)
