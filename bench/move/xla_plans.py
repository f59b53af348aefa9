"""What XLA's SPMD partitioner would do: compile an identity between two shardings and read the collectives.

jax fixes its number of host devices when it is imported, so the compiling is done in a process of its own,
`python -m bench.move.xla_plans`: problems come in and plans go out as JSON. Nothing is allocated or run.
Traffic follows the model of `scrimp.ext.dtensor_plans`, with L for a collective-permute. The peak is the largest
array that an instruction of the entry computation yields; what a fusion has inside is never stored.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from scrimp.errors import ScrimpError
from scrimp.ext.dtensor_plans import PeerPlan
from scrimp.layout import Layout, Mesh

_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>\(.*?\)|\S+) (?P<op>[\w\-]+)\((?P<rest>.*)")
_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")
_CALLED = re.compile(r"(?:calls|to_apply)=%?([\w.\-]+)")
_ARRAY = re.compile(r"f32\[([\d,]*)\]")  # only the problem's array is f32; offsets and their tables are whole numbers
_COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


def xla_plans(problems: Sequence[tuple[Sequence[int], Mesh, Layout | str, Layout | str]]) -> list[PeerPlan] | None:
    """One plan for each (shape, mesh, src, dst), for float32; None where jax is not installed."""
    asked = [_as_json(*problem) for problem in problems]
    devices = max((mesh.size for _, mesh, _, _ in problems), default=1)
    done = subprocess.run(
        [sys.executable, "-m", "bench.move.xla_plans"],
        input=json.dumps(asked),
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise ScrimpError(f"compiling {len(asked)} problems with jax failed:\n{done.stderr[-2000:]}")
    answer = json.loads(done.stdout)
    return answer and [PeerPlan(**{**plan, "steps": tuple(plan["steps"])}) for plan in answer]


def _as_json(shape: Sequence[int], mesh: Mesh, src: Layout | str, dst: Layout | str) -> dict[str, object]:
    ends = Layout.parse(src), Layout.parse(dst)
    for layout in ends:
        layout.validate(mesh, shape)
        names = [axis for axes in layout.dims for axis in axes]
        if layout.partial or not set(names) <= set(mesh.names):
            raise ScrimpError(f"layout {layout}: a jax sharding has no partial sums and no parts of a mesh axis")
        if any(size % count for size, count in zip(shape, layout.counts(mesh), strict=True)):
            raise ScrimpError(f"layout {layout} of {tuple(shape)} on {mesh}: jax needs dims that divide evenly")
    return {"shape": list(shape), "mesh": mesh.axes, "src": ends[0].dims, "dst": ends[1].dims}


class _Instruction(NamedTuple):
    name: str
    op: str
    numels: tuple[int, ...]  # of each f32 array it yields
    rest: str  # operands and attributes


def read_hlo(text: str) -> PeerPlan:
    """The plan that a compiled HLO module carries out."""
    computations, entry = _computations(text)
    steps: list[str] = []
    received = peak = 0
    sizes: dict[str, int] = {}
    for instruction, stored in _walk(computations, entry):
        base, start, _ = instruction.op.partition("-start")
        numel = sum(instruction.numels)
        if start and base in ("all-gather", "collective-permute"):  # yields (operand, result, ...)
            numel = instruction.numels[1]
        sizes[instruction.name] = numel
        if stored and instruction.op != "tuple":
            peak = max(peak, numel)
        if base in _COLLECTIVES:
            step, moved = _traffic(base, instruction, numel, sizes)
            steps.append(step)
            received += moved
        elif base == "dynamic-slice" and numel:
            steps.append("slice")
    return PeerPlan(steps=tuple(steps), received_numel=received, peak_numel=peak)


def _traffic(op: str, instruction: _Instruction, numel: int, sizes: dict[str, int]) -> tuple[str, int]:
    if op == "collective-permute":
        pairs = re.findall(r"\{(\d+),(\d+)\}", instruction.rest.partition("source_target_pairs=")[2])
        return "collective_permute", numel if any(source != target for source, target in pairs) else 0
    if op == "all-gather":
        before = sizes[instruction.rest.partition("%")[2].partition(")")[0]]
        return f"all_gather {numel // before}-way", numel - before
    n = len(instruction.numels) if op == "all-to-all" and len(instruction.numels) > 1 else _group_size(instruction.rest)
    if op == "reduce-scatter":
        return f"reduce_scatter {n}-way", (n - 1) * numel
    trips = 2 if op == "all-reduce" else 1
    return f"{op.replace('-', '_')} {n}-way", -(-trips * (n - 1) * numel // n)


def _group_size(rest: str) -> int:
    """Devices in a group: 2 in `{{0,1},{2,3}}`, 2 in `[4,2]<=[8]`, and 2 * 3 in `mesh['a'=4,'b'=3] {'a':(2)2,'b'}`."""
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", rest):
        return listed[1].count(",") + 1
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]<=", rest):
        return int(iota[1])
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", rest):
        whole = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        return prod(int(part or whole[axis]) for axis, part in re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", named[2]))
    raise ScrimpError(f"no replica groups are known in: {rest[:300]}")


def _walk(computations: dict[str, list[_Instruction]], name: str, stored: bool = True) -> Iterator[tuple[_Instruction, bool]]:
    """The instructions in order, those of a called computation before its caller, and whether each one's result is stored."""
    for instruction in computations[name]:
        if (called := _CALLED.search(instruction.rest)) and instruction.op in ("fusion", "call", "async-start"):
            yield from _walk(computations, called[1], stored and instruction.op != "fusion")
        yield instruction, stored and instruction.op != "async-start"


def _computations(text: str) -> tuple[dict[str, list[_Instruction]], str]:
    found: dict[str, list[_Instruction]] = {}
    entry = current = ""
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        if header := _COMPUTATION.match(line):
            current = header["name"]
            found[current] = []
            entry = current if header["entry"] else entry
        elif current and (match := _INSTRUCTION.match(line)):
            numels = tuple(prod(map(int, filter(None, dims.split(",")))) for dims in _ARRAY.findall(match["type"]))
            found[current].append(_Instruction(match["name"], match["op"], numels, match["rest"]))
    return found, entry


def _compile_all(problems: list[dict[str, Any]]) -> list[PeerPlan] | None:
    try:
        jax: Any = importlib.import_module("jax")
        np: Any = importlib.import_module("numpy")
    except ImportError:
        return None
    sharding = jax.sharding
    plans = []
    for problem in problems:
        names, sizes = zip(*problem["mesh"], strict=True)
        mesh = sharding.Mesh(np.array(jax.devices()[: prod(sizes)]).reshape(sizes), names)
        specs = (sharding.PartitionSpec(*(tuple(axes) or None for axes in problem[end])) for end in ("src", "dst"))
        src, dst = (sharding.NamedSharding(mesh, spec) for spec in specs)
        identity = jax.jit(lambda array: array, in_shardings=src, out_shardings=dst)
        array = jax.ShapeDtypeStruct(tuple(problem["shape"]), np.float32)
        plans.append(read_hlo(identity.lower(array).compile().as_text()))
    return plans


if __name__ == "__main__":
    results = _compile_all(json.load(sys.stdin))
    json.dump(results and [asdict(plan) for plan in results], sys.stdout)
