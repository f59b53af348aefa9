"""What `make bench-gpu` measures, in sections of at most 8 minutes; each docstring says what for, and about how long.

Seconds are estimates for one H200 with 16 cores. A row that another section has already is not measured twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.gpu.cases import Case
from bench.gpu.contenders import COMPUTE, FSDP2, FSDP2_KEPT, PLAIN, SCRIMP, TORCHAO, ZERO2, ZERO3

FULL, HOST = "139GiB", "113GiB"  # of the card, and of the host for models that need nearly all of it
B7: dict[str, Any] = {"layers": 32, "dim": 4096, "batch": 8}  # 6.86B parameters
B3: dict[str, Any] = {"layers": 32, "dim": 2560, "batch": 8}  # 2.78B
SMALL = Case(layers=24, dim=2048, batch=8, cap=FULL, steps=40)  # 1.42B: its steps are short, so there are more of them
CAPS = ["12GiB", "16GiB", "24GiB", "40GiB", "60GiB", "80GiB", "110GiB", FULL]
LARGEST: dict[str, Any] = {"dim": 5120, "cap": FULL, "host": HOST, "warm_up": 2, "steps": 2, "clipped": False}
TINY = Case(layers=2, dim=256, batch=2, seq=64, vocab=512, cap="1GiB")


@dataclass(frozen=True, kw_only=True)
class Point:
    """A case and who is measured there. `search`: part of a search upwards; a contender that failed is not asked again."""

    case: Case
    contenders: Sequence[str]
    search: bool = False


def cap_24() -> list[Point]:
    """7B in 24 GiB against FSDP2, unclipped and clipped. scrimp 55 s, FSDP2 100 s."""
    return [Point(case=Case(**B7, cap="24GiB"), contenders=[SCRIMP, FSDP2, PLAIN])]


def cap_80() -> list[Point]:
    """7B in 80 GiB, and what compute alone takes. scrimp 45 s, compute 30 s, FSDP2 keeping weights 150 s; else as at
    24 GiB."""
    return [Point(case=Case(**B7, cap="80GiB"), contenders=[SCRIMP, COMPUTE, FSDP2_KEPT, FSDP2, PLAIN])]


def cap_12() -> list[Point]:
    """3B in 12 GiB, against all. scrimp 35 s, ZeRO-2 70 s and once 60 s of building its Adam, ZeRO-3 80 s, FSDP2 60 s,
    torchao 60 s."""
    return [Point(case=Case(**B3, cap="12GiB"), contenders=[SCRIMP, ZERO2, ZERO3, FSDP2, TORCHAO, PLAIN])]


def batch_32() -> list[Point]:
    """Four times the tokens, where compute should be all there is. scrimp 70 s and 90 s, compute 40 s, FSDP2 120 s."""
    large = {**B7, "batch": 32}
    return [
        Point(case=Case(**large, cap="80GiB"), contenders=[SCRIMP, COMPUTE, FSDP2]),
        Point(case=Case(**large, cap="24GiB"), contenders=[SCRIMP]),
    ]


def all_fits() -> list[Point]:
    """Where everything fits: scrimp must not cost anything. Four processes of 25 s."""
    return [Point(case=replace(SMALL, recompute=recompute), contenders=[SCRIMP, PLAIN]) for recompute in ("all", "none")]


def llama() -> list[Point]:
    """Other ordinary modules: the zoo's Llama and that of transformers, 1.6B each. scrimp 35 s, FSDP2 45 s, twice."""
    shape: dict[str, Any] = {"layers": 30, "dim": 2048, "batch": 8, "vocab": 32000, "cap": "12GiB"}
    return [Point(case=Case(model=model, **shape), contenders=[SCRIMP, FSDP2]) for model in ("llama", "hf-llama")]


def sizes() -> list[Point]:
    """Step time against model size on the whole card. scrimp 25, 30, 45, 60 and 90 s, plain 25 and 40 s, FSDP2 40 s;
    the rest is measured elsewhere too."""
    small, middle = [SCRIMP, PLAIN, FSDP2], [Case(**B3, cap=FULL), Case(**B7, cap=FULL)]
    large = [Case(layers=layers, dim=5120, batch=8, cap=FULL, host=HOST) for layers in (40, 56)]  # 13.1B, 18.1B
    return [
        *(Point(case=case, contenders=small) for case in (SMALL, *middle)),
        *(Point(case=replace(case, warm_up=2, steps=2), contenders=[SCRIMP]) for case in large),
    ]


def caps() -> list[Point]:
    """Step time of 7B against the cap; the others hardly depend on it. Six of 50 s, two being in other sections."""
    return [Point(case=Case(**B7, cap=cap), contenders=[SCRIMP]) for cap in CAPS]


def largest() -> list[Point]:
    """The largest that trains four steps on card and host: scrimp 18.1B 80 s, 28B with int8 states 110 s, FSDP2 in steps
    of 0.4B from 7.3B up (6.9B is in other sections), 90 s each until one fails."""
    return [
        Point(case=Case(**LARGEST, layers=56, batch=4), contenders=[SCRIMP]),
        Point(case=Case(**LARGEST, layers=88, batch=4, states="int8"), contenders=[SCRIMP]),
        *_search([FSDP2], 4096, (34, 36, 38)),
    ]


def largest_deepspeed() -> list[Point]:
    """As `largest`, in steps of 0.8B from 4.4B up; 70 s each until one fails."""
    return _search([ZERO2, ZERO3], 4096, (20, 24, 28, 32))


def _search(contenders: Sequence[str], dim: int, depths: Sequence[int]) -> list[Point]:
    case = Case(**{**LARGEST, "dim": dim, "host": "auto"}, layers=0, batch=4)
    return [Point(case=replace(case, layers=layers), contenders=contenders, search=True) for layers in depths]


def tiny() -> list[Point]:
    """To try it all out, without a GPU too. A few seconds each."""
    return [Point(case=TINY, contenders=[SCRIMP, PLAIN, COMPUTE, FSDP2, ZERO2, ZERO3, TORCHAO])]


def tiny_llama() -> list[Point]:
    """The same with the other models, and a search."""
    found = [Point(case=replace(TINY, model=model), contenders=[SCRIMP, PLAIN, FSDP2]) for model in ("llama", "hf-llama")]
    short = replace(TINY, warm_up=2, steps=2, clipped=False)
    return found + [Point(case=replace(short, layers=n), contenders=[SCRIMP, PLAIN], search=True) for n in (3, 4)]


SECTIONS: dict[str, Callable[[], list[Point]]] = {
    "24GiB": cap_24, "80GiB": cap_80, "12GiB": cap_12, "batch-32": batch_32, "all-fits": all_fits, "llama": llama,
    "sizes": sizes, "caps": caps, "largest": largest, "largest-deepspeed": largest_deepspeed,
    "tiny": tiny, "tiny-llama": tiny_llama,
}  # fmt: skip


def points_on(device: str, section: str) -> list[Point]:
    return [replace(point, case=replace(point.case, device=device)) for point in SECTIONS[section]()]
