"""Plans a model on pipeline stages: chooses the cut and solves each stage.

    memory       minimises the peak of the worst stage; then the time of every stage within that peak
    time         the cut whose busiest stage is fastest, and then the others, within the limit
    redundancy   cut as for memory; then minimises the bytes held by every stage, and the gap is to that, with this cut

`pipeline/partition.py` chooses the cut. A stage's value is that of its integer program. Its lower bound is the bytes of its
weights, and of the activations of each micro-batch in flight, evenly split over its devices. With interleaving a device's chunks
are not adjacent: the cut then minimises that bound for the worst chunk, and a local search moves one border at a time as long as
the worst device's peak falls.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from scrimp.cluster import Link
from scrimp.errors import FitError
from scrimp.ledger import format_nbytes
from scrimp.planner.deadline import Deadline
from scrimp.planner.pipeline.partition import Cut, Kind, Search, best_cut, tables
from scrimp.planner.pipeline.schedule import Timing, Work, simulate
from scrimp.planner.pipeline.stage import Floors, Setup, Stage, held_before
from scrimp.planner.shard.stage_subgraph import Piece, piece
from scrimp.planner.solver.model import PEAK, SECONDS
from scrimp.planner.solver.solve import MEMORY, REDUNDANCY, TIME, Solution, result

Say = Callable[[str], None]
_MOVES = 12  # most borders that the local search moves


@dataclass(frozen=True, kw_only=True)
class Staged:
    """`gap`: of the objective; `cut`: the first layer of each chunk, then the end. `timing`: without the work done once in a
    step, which `seconds` includes."""

    stages: tuple[Stage, ...]
    solutions: tuple[Solution, ...]
    cut: Cut
    timing: Timing
    seconds: float
    gap: float


class Planner:
    def __init__(self, setup: Setup, objective: str, limit: int, *, deadline: Deadline, gap: float, say: Say) -> None:
        self.setup, self.objective, self.limit, self.gap, self.say = setup, objective, limit, gap, say
        self.deadline = deadline
        self.solve_seconds = deadline.left() / (4 * setup.stages)
        self.count = len(setup.graph.layers)
        self.floors = Floors(setup)
        self._stages: dict[tuple[object, ...], Stage] = {}
        self._pieces: dict[tuple[int, int], Piece] = {}

    def run(self) -> Staged:
        setup = self.setup
        if setup.interleave > 1:
            cut, gap = self._interleaved()
        else:
            by_time = self.objective == TIME
            search = Search(
                layers=self.count, stages=setup.stages, kind=self._kind, floor=self._floor, exact=self._exact,
                score=self._steps if by_time else None,
            )  # fmt: skip
            found, value, bound = search.run(gap=self.gap, deadline=self.deadline.at)
            if found is None or (not by_time and value > self.limit):
                raise self._no_fit(found)
            cut, gap = found, (value - bound) / value
        return self._answered(cut, gap)

    # The value of a stage.

    def _stage(self, stage: int, cut: Cut) -> Stage:
        """`cut`: of all chunks."""
        setup = self.setup
        mine = [self._piece(cut[k], cut[k + 1]) for k in range(stage, len(cut) - 1, setup.stages)]
        key = (tuple(each.kind for each in mine), held_before(mine), setup.scenes[stage], self._links(stage))
        if key not in self._stages:
            what = ", ".join(f"{each.first} to {each.stop - 1}" for each in mine)
            self.say(f"planning stage {stage} of {setup.stages} with the layers {what}")
            self._stages[key] = Stage(setup, stage, mine)
        made = self._stages[key]
        return made if (made.stage, made.pieces) == (stage, tuple(mine)) else made.elsewhere(stage, mine)

    def _links(self, stage: int) -> tuple[Link, Link]:
        return self.setup.links[stage - 1], self.setup.links[stage]

    def _piece(self, first: int, stop: int) -> Piece:
        if (first, stop) not in self._pieces:
            self._pieces[first, stop] = piece(self.setup.graph, first, stop)
        return self._pieces[first, stop]

    def _exact(self, s: int, i: int, j: int) -> tuple[float, float]:
        # Only this stage's borders matter.
        stage = self._stage(s, (*(0 for _ in range(s)), i, *(j for _ in range(self.setup.stages - s))))
        objective, limit = (SECONDS, float(self.limit)) if self.objective == TIME else (PEAK, inf)
        return stage.least(objective, limit, self._left(), self.gap)

    def _left(self) -> float:
        """Seconds for one solve of a stage."""
        return min(self.solve_seconds, self.deadline.left())

    def _kind(self, s: int, i: int, j: int) -> Kind:
        classes = "".join(chr(layer.graph) for layer in self.setup.graph.layers[i:j])
        ends = (i == 0, j == self.count, self._links(s) if self.objective == TIME else None)
        return Kind(setting=ends, layers=classes, weight=self.setup.flights(s))

    def _floor(self, s: int, i: int, j: int) -> float:
        nbytes = self.floors.nbytes(i, j, self.setup.flights(s))
        if self.objective == TIME:
            return inf if nbytes > self.limit else self.floors.seconds(i, j)
        return nbytes

    def _steps(self, largest: float, total: float) -> float:
        """Seconds of a step from those of the busiest stage and of all stages: the busiest runs every micro-batch, the others add
        one micro-batch each."""
        count = self.setup.micro_batches
        return ((count - 1) * largest + total) / count

    # Interleaved pipelines.

    def _interleaved(self) -> tuple[Cut, float]:
        setup, memory = self.setup, self.objective != TIME
        found = best_cut(*tables(setup.stages * setup.interleave, self.count, lambda *where: (self._floor(*where),) * 2))
        if found is None:
            raise self._no_fit(None)
        best = found[0]
        value, worst, bound = self._worst(best)
        for _ in range(_MOVES if memory else 0):
            if self.deadline.passed:
                break
            tried = [self._worst(each) + (each,) for each in _moved(best, worst, setup.stages)]
            better = min(tried, default=None)
            if better is None or better[0] >= value:
                break
            value, worst, bound, best = better
        if value > self.limit:
            raise self._no_fit(best)
        return best, (value - bound) / value

    def _worst(self, cut: Cut) -> tuple[float, int, float]:
        """The largest peak of a cut's stages, the stage that has it, and its lower bound."""
        peaks = [self._stage(s, cut).least(PEAK, inf, self._left(), self.gap) for s in range(self.setup.stages)]
        return max((value, s, bound) for s, (value, bound) in enumerate(peaks))

    # The result.

    def _answered(self, cut: Cut, gap: float) -> Staged:
        setup = self.setup
        stages = [self._stage(s, cut) for s in range(setup.stages)]
        limit: float = self.limit
        if self.objective == MEMORY:
            limit = min(limit, self._worst(cut)[0])
        objective = REDUNDANCY if self.objective == REDUNDANCY else TIME
        self.say("minimising the time of every stage")
        solutions: dict[int, Solution] = {}
        for stage in stages:
            if id(stage.session) not in solutions:
                left = self.deadline.left() / (setup.stages - len(solutions))
                solutions[id(stage.session)] = result(
                    stage.session, objective, int(limit), slack=0.0, seconds=left, gap=self.gap, begin=time.monotonic()
                )
        chosen = [solutions[id(stage.session)] for stage in stages]
        if objective == REDUNDANCY:
            held, least = (sum(getattr(one.phases[0], what) for one in chosen) for what in ("value", "bound"))
            gap = (held - least) / held
        works: list[Work] = []
        every = [stage.works(solution.choice) for stage, solution in zip(stages, chosen, strict=True)]
        for chunk in range(setup.interleave):
            works += [each[chunk] for each in every]
        timing = simulate(works, setup.stages, setup.micro_batches)
        once = [stage.once_seconds(solution.choice) for stage, solution in zip(stages, chosen, strict=True)]
        seconds = max(end + after for end, after in zip(timing.ends, once, strict=True))
        return Staged(stages=tuple(stages), solutions=tuple(chosen), cut=cut, timing=timing, seconds=seconds, gap=gap)

    def _no_fit(self, cut: Cut | None) -> FitError:
        where = "" if cut is None else f", cut at the layers {', '.join(map(str, cut[1:-1]))}"
        peak = (
            "" if cut is None else f"the least peak of the worst stage is {format_nbytes(int(self._worst(cut)[0]))}{where}, and "
        )
        return FitError(
            f"{self.setup.stages} stages of {self.setup.moves.mesh.size} devices and {self.setup.micro_batches} micro-batches: "
            f"{peak}the budget is {format_nbytes(self.limit)} a device{'' if peak else ', and no cut fits'}; "
            "give more devices, more micro-batches, or a smaller batch"
        )


def _moved(cut: Cut, worst: int, stages: int) -> list[Cut]:
    """The cuts with one layer less in a chunk of the worst stage."""
    found = []
    for k in range(worst, len(cut) - 1, stages):
        if cut[k + 1] - cut[k] > 1:
            if k > 0:
                found.append((*cut[:k], cut[k] + 1, *cut[k + 1 :]))
            if k + 2 < len(cut):
                found.append((*cut[: k + 1], cut[k + 1] - 1, *cut[k + 2 :]))
    return found
