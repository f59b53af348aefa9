"""All cases of `make test-run`, and the pairwise sample of them that `make test` runs.

A case is a model, a mesh, a plan and an optimizer. `GENERATORS` has the sources of cases; plans with pipeline stages come as
another function there, with their plans in `plans.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, product

from tests.run.models import MODELS
from tests.run.pairwise import Row, pairwise
from tests.run.plans import BASELINES, OWN

MESHES = ("x=2", "x=4", "x=2,y=2", "x=8", "x=2,y=4", "x=2,y=2,z=2")
OPTIMIZERS = ("sgd", "adamw")


@dataclass(frozen=True)
class Case:
    model: str
    mesh: str
    way: str
    optimizer: str

    def __str__(self) -> str:
        return f"{self.model} {self.mesh} {self.way} {self.optimizer}"


def possible(model: str, mesh: str, way: str) -> bool:
    """Whether there is such a plan. Tensor parallelism is defined for transformers; with it goes a split of the sequence of tokens;
    a distributed optimizer needs a data-parallel axis; selective recompute needs attention in several operators."""
    if not way.startswith("tp"):
        return True
    if "selective" in way and not FUSED.isdisjoint((model,)):
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


GENERATORS: tuple[Callable[[], Iterator[Case]], ...] = (without_stages,)


def every_case() -> list[Case]:
    return [case for generate in GENERATORS for case in generate()]


# The sample. Its factors are classes of models, meshes and plans, whose members take turns: so that all of them come, and every
# two classes meet.
FAMILIES: dict[str, tuple[str, ...]] = {
    "gpt": ("gpt-tiny", "hf-gpt2", "gpt-256"),
    "llama": ("llama-tiny", "hf-llama", "hf-qwen2"),
    "bert": ("bert-tiny", "hf-bert"),
    "vit": ("vit-tiny", "hf-vit"),
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
    "tensor": ("tp-sp", "tp", "tp-sp-dist-opt", "tp-sp-selective", "tp-full", "tp-sp-dist-opt-full", "tp-selective"),
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
        options = product(*(_from(each[name], next(turns[name])) for name, each in _classes(family, shape, kind)))
        model, mesh, way = next(option for option in options if possible(*option))
        found.append(Case(model, mesh, way, optimizer))
    return found


def _classes(family: str, shape: str, kind: str) -> list[tuple[str, dict[str, tuple[str, ...]]]]:
    return [(family, FAMILIES), (shape, SHAPES), (kind, KINDS)]


def _from(members: tuple[str, ...], turn: int) -> tuple[str, ...]:
    """The members, beginning with the one whose turn it is."""
    first = turn % len(members)
    return (*members[first:], *members[:first])
