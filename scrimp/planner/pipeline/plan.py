"""Plans pipeline stages and micro-batches: turns the arguments of `scrimp.plan` into a `Plan` with a schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from scrimp.cluster import Cluster, Link
from scrimp.errors import PlanError
from scrimp.planner.answers.from_solution import inputs_of, layers_of, memory_at
from scrimp.planner.answers.plan import KeptWhole, Plan, PlannedArrival, PlannedLayers, PlannedMemory, PlannedStage, Schedule
from scrimp.planner.answers.unsharded_ops import costs_of_whole
from scrimp.planner.deadline import Deadline
from scrimp.planner.formulation.assembly import Assembly
from scrimp.planner.pipeline.planner import Planner, Say, Staged
from scrimp.planner.pipeline.stage import Setup, Stage
from scrimp.planner.shard.layer_runs import names_of_points
from scrimp.planner.shard.options import Work as Seconds
from scrimp.planner.shard.placement import Placed
from scrimp.planner.solver.solve import Solution

AUTO = "auto"
_MOST_STAGES = 8
_TIMES = (1, 2, 4)  # tries these multiples of the stages as micro-batches


def staged_plan(
    assembly: Assembly, cluster: Cluster, links: tuple[Link, ...], *, optimizer: str, objective: str, limit: int,
    micro_batches: int, interleave: int, deadline: Deadline, gap: float, ways: Sequence[str], work: Seconds, say: Say,
) -> Plan:  # fmt: skip
    """`assembly`: all layers on the mesh of a stage, with the batch of one micro-batch; `links`: from each stage to the next."""
    graph = assembly.graph
    by_class = {graph.layers[part.first].graph: part.model for part in assembly.parts}
    setup = Setup(
        graph=graph, models=tuple(by_class[k] for k in range(len(graph.graphs))), moves=assembly.moves,
        precision=assembly.precision, rates=assembly.rates, ways=ways, links=links, micro_batches=micro_batches,
        interleave=interleave,
    )  # fmt: skip
    pieces = len(links) * interleave
    if pieces > len(graph.layers):
        each = f" of {interleave} pieces each" if interleave > 1 else ""
        raise PlanError(
            f"{len(links)} stages{each} of a model of {len(graph.layers)} layers: use fewer, a piece has at least one layer"
        )
    found = Planner(setup, objective, limit, deadline=deadline, gap=gap, say=say).run()
    stages = tuple(_planned_stage(setup, stage, solution) for stage, solution in zip(found.stages, found.solutions, strict=True))
    return Plan(
        mesh=assembly.moves.mesh,
        cluster=cluster.to_json(),
        precision=assembly.precision.name,
        optimizer=optimizer,
        objective=objective,
        memory=max((stage.memory for stage in stages), key=lambda memory: memory.peak_nbytes),
        seconds=found.seconds,
        gap=found.gap,
        seconds_gap=max(solution.phases[-1].gap for solution in found.solutions),
        held_nbytes=sum(solution.held_nbytes for solution in found.solutions) // len(found.solutions),
        layers=_layers(found),
        batch=inputs_of(graph, _chosen(found)),
        whole=_whole(found, work),
        schedule=Schedule(micro_batches=micro_batches, stages=stages, bubble=found.timing.bubble),
    )


def _planned_stage(setup: Setup, stage: Stage, solution: Solution) -> PlannedStage:
    works = stage.works(solution.choice)
    arrivals = [*_arrivals(stage, solution)]
    return PlannedStage(
        pieces=tuple((piece.first, piece.stop) for piece in stage.pieces),
        in_flight=max(sum(scene.flights) for scene in setup.scenes[stage.stage]),
        received=tuple(
            (f"{'gradient' if each.gradient else 'input'} {each.name}", str(Placed(each.factors))) for each in arrivals
        ),
        arrivals=tuple(arrivals),
        memory=_memory(setup, stage, solution),
        seconds=setup.micro_batches * sum(work.forward + work.backward for work in works) + stage.once_seconds(solution.choice),
        source=(stage, solution),
    )


def _arrivals(stage: Stage, solution: Solution) -> Iterator[PlannedArrival]:
    for piece, assembly, choice in zip(stage.pieces, stage.assemblies, stage.joined.choices(solution.choice), strict=True):
        nodes = [(piece.arrivals[k], False, node) for k, node in assembly.inputs.items()]
        nodes += [(f"{piece.first + layer}:{name}", True, node) for (layer, name), node in assembly.tangents.items()]
        for name, gradient, node in nodes:
            place = assembly.received[node][choice[node]]
            yield PlannedArrival(piece=piece.first, name=name, gradient=gradient, factors=place.dims)


def _memory(setup: Setup, stage: Stage, solution: Solution) -> PlannedMemory:
    piece, point = stage.joined.local(solution.point)
    assembly = stage.assemblies[piece]  # its own names: stages with identical layers share one problem
    return memory_at(stage.joined.sketch, setup.moves.mesh.size, solution, names_of_points(assembly.graph, assembly.parts)[point])


def _chosen(found: Staged) -> Iterator[tuple[Assembly, Sequence[int]]]:
    for stage, solution in zip(found.stages, found.solutions, strict=True):
        yield from zip(stage.assemblies, stage.joined.choices(solution.choice), strict=True)


def _layers(found: Staged) -> tuple[PlannedLayers, ...]:
    """The layers of all stages, in model order."""
    every: list[PlannedLayers] = []
    for stage, solution in zip(found.stages, found.solutions, strict=True):
        for piece, assembly, choice in zip(stage.pieces, stage.assemblies, stage.joined.choices(solution.choice), strict=True):
            for layers in layers_of(assembly, replace(solution, choice=choice)):
                every.append(replace(layers, first=piece.first + layers.first))
    return tuple(sorted(every, key=lambda layers: layers.first))


def _whole(found: Staged, work: Seconds) -> tuple[KeptWhole, ...]:
    """Operators without a rule, of all stages; identical layers are reported once."""
    every: dict[str, KeptWhole] = {}
    for stage, solution in zip(found.stages, found.solutions, strict=True):
        for assembly, choice in zip(stage.assemblies, stage.joined.choices(solution.choice), strict=True):
            if all(member.ruled for part in assembly.parts for group in part.model.groups for member in group.members):
                continue
            for one in costs_of_whole(assembly, assembly.sketch.problem(), replace(solution, choice=choice), work):
                known = every.get(one.target)
                every[one.target] = one if known is None else replace(
                    known, times=known.times + one.times, seconds=known.seconds + one.seconds,
                    redundant_nbytes=max(known.redundant_nbytes, one.redundant_nbytes),
                )  # fmt: skip
    return tuple(every.values())


def schedules(stages: int | str, micro_batches: int | str, interleave: int, devices: int, batch: int) -> list[tuple[int, int]]:
    """The (stages, micro-batches) pairs to try."""
    for name, value in (("stages", stages), ("micro_batches", micro_batches), ("interleave", interleave)):
        number = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if not number and (value != AUTO or name == "interleave"):
            raise PlanError(f"{name}={value!r}: it is a number of 1 or more{'' if name == 'interleave' else f', or {AUTO!r}'}")
    if interleave > 1 and stages == 1:
        raise PlanError(f"interleave={interleave}: interleaving needs more than one stage; give stages")
    powers = [2**k for k in range(_MOST_STAGES.bit_length()) if devices % 2**k == 0]
    tried = [stages] if isinstance(stages, int) else [each for each in powers if each > 1 or interleave == 1]
    found = []
    for each in tried:
        counts = [micro_batches] if isinstance(micro_batches, int) else [each * times for times in _TIMES]
        for count in counts:
            if isinstance(micro_batches, str) and (batch % count or (interleave > 1 and count % each)):
                continue
            found.append((each, count))
    for each, count in found:
        if batch % count:
            fitting = [one for one in range(1, batch + 1) if batch % one == 0]
            near = {max(one for one in fitting if one < count), min((one for one in fitting if one > count), default=batch)}
            raise PlanError(
                f"micro_batches={count}: the batch has {batch} rows, which {count} does not divide; "
                f"use {' or '.join(map(str, sorted(near)))}"
            )
        if interleave > 1 and count % each:
            raise PlanError(
                f"interleave={interleave}: {each} stages take turns with {each} micro-batches, and micro_batches={count} is no "
                f"multiple of that; use {max(each, round(count / each) * each)}"
            )
    if not found:
        raise PlanError(f"stages={stages!r}, micro_batches={micro_batches!r}: nothing fits a batch of {batch} rows")
    return found
