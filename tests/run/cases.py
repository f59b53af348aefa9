"""All cases of `make test-run`, and the pairwise sample of them that `make test` runs.

A case is a model, a mesh, a plan and an optimizer; with pipeline stages the mesh is that of a stage. `GENERATORS` has the sources
of cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, product

from tests.lower.test_ranks import OWN
from tests.run.models import MODELS, STAGED, is_wide
from tests.run.pairwise import Row, pairwise
from tests.run.plans import BASELINES

MESHES = ("x=2", "x=4", "x=2,y=2", "x=8", "x=2,y=4", "x=2,y=2,z=2")
OPTIMIZERS = ("sgd", "adamw")
NO_REPEATS = ("resnet-tiny", "vgg-tiny", "vgg-tiny-bn")  # models without two equal layers


@dataclass(frozen=True)
class Case:
    model: str
    mesh: str
    way: str
    optimizer: str
    stages: int = 1
    interleave: int = 1

    def __str__(self) -> str:
        pipeline = f" stages={self.stages} interleave={self.interleave}" if self.stages > 1 else ""
        return f"{self.model} {self.mesh} {self.way} {self.optimizer}{pipeline}"


def possible(model: str, mesh: str, way: str) -> bool:
    """Whether there is such a plan. Full recompute is of layers that repeat; selective recompute is of attention that is not one
    operator. Tensor parallelism is defined for transformers; its split of the sequence needs tokens, its distributed optimizer a
    data-parallel axis."""
    if way.endswith("-full") and model in NO_REPEATS:
        return False
    if not way.startswith("tp"):
        return True
    if "selective" in way and "eager" not in model:
        return False
    if any(word in model for word in ("resnet", "vgg", "moe", "mixtral")):
        return False
    if "sp" in way and "vit" in model:
        return False
    return "dist-opt" not in way or "," in mesh


def without_stages() -> Iterator[Case]:
    for case in product(MODELS, MESHES, (*OWN, *BASELINES), OPTIMIZERS):
        if possible(*case[:3]):
            yield Case(*case)


STAGES = {2: ("x=1", "x=2", "x=4", "x=2,y=2"), 4: ("x=1", "x=2")}  # meshes of a stage, on up to 8 ranks


def with_stages() -> Iterator[Case]:
    """1F1B, and interleaved with two pieces a stage. Wide models run the plan of least memory alone: they are for the bytes."""
    for model, (stages, meshes), interleave in product(STAGED, STAGES.items(), (1, 2)):
        for mesh, way, optimizer in product(meshes, ("least",) if is_wide(model) else OWN, OPTIMIZERS):
            yield Case(model, mesh, way, optimizer, stages, interleave)


GENERATORS: tuple[Callable[[], Iterator[Case]], ...] = (without_stages, with_stages)


def every_case() -> list[Case]:
    return [case for generate in GENERATORS for case in generate()]


# The sample. Its factors are classes of models, meshes and plans, whose members take turns: so that all of them come, and every
# two classes meet.
FAMILIES: dict[str, tuple[str, ...]] = {
    "gpt": ("gpt-tiny", "hf-gpt2", "gpt-256", "hf-gpt2-eager"),
    "llama": ("llama-tiny", "hf-llama", "hf-qwen2", "llama-256"),
    "encoder": ("bert-tiny", "hf-vit", "vit-tiny", "hf-bert"),
    "convolutions": ("resnet-tiny", "vgg-tiny-bn", "hf-resnet"),
    "experts": ("moe-tiny", "hf-mixtral"),
    "encoder-decoder": ("hf-t5",),
}
SHAPES: dict[str, tuple[str, ...]] = {
    "one axis": ("x=2", "x=4", "x=2"),
    "two axes": ("x=2,y=2",),
    "three axes": ("x=2,y=2,z=2",),
}
KINDS: dict[str, tuple[str, ...]] = {
    "least memory": ("least", "offload", "recompute"),
    "least time": ("fast", "keep"),
    "data": ("zero-3", "ddp", "zero-1", "zero-2-full", "zero-3-full", "ddp-full", "zero-1-full", "zero-2"),
    "tensor": ("tp-sp", "tp", "tp-sp-dist-opt", "tp-full", "tp-sp-selective", "tp-sp-dist-opt-full"),
}


def sample() -> list[Case]:
    """Pairwise over the classes."""

    def can(row: Row) -> bool:
        family, shape, kind, _ = map(str, row)
        return any(possible(model, mesh, way) for model, mesh, way in product(FAMILIES[family], SHAPES[shape], KINDS[kind]))

    turns = {name: count() for name in (*FAMILIES, *SHAPES, *KINDS)}
    found = []
    for row in pairwise([[*FAMILIES], [*SHAPES], [*KINDS], OPTIMIZERS], can):
        family, shape, kind, optimizer = map(str, row)
        models, meshes, ways = (_from(each[name], next(turns[name])) for name, each in _classes(family, shape, kind))
        if shape == "three axes":  # 8 processes, each of which captures the model: those of Hugging Face take longest
            models = tuple(sorted(models, key=lambda model: model.startswith("hf-")))
        model, mesh, way = next(option for option in product(models, meshes, ways) if possible(*option))
        found.append(Case(model, mesh, way, optimizer))
    return found


def _classes(family: str, shape: str, kind: str) -> list[tuple[str, dict[str, tuple[str, ...]]]]:
    return [(family, FAMILIES), (shape, SHAPES), (kind, KINDS)]


def _from(members: tuple[str, ...], turn: int) -> tuple[str, ...]:
    """The members, beginning with the one whose turn it is."""
    first = turn % len(members)
    return (*members[first:], *members[:first])
