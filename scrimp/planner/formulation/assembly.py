"""Builds the planner's problem from the layers of a model.

    a node for each group of operators      seconds of its options, and bytes of its outputs while they live
    a node for each group's weights         their ZeRO levels at rest
    an edge where a group uses another's    seconds of resharding, once in the forward and once in the backward, and
                                            bytes of the copy while it is used

A layer's saved activations are held by all layers of a part: by the layer whose points are modelled from when it makes them to
their last use, by the others all the while; unless the group recomputes or offloads them (`cost/activation_policy.py`). Outputs
to other layers are always kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from scrimp._arguments import KEEP, OFFLOAD, RECOMPUTE, WAYS
from scrimp.capture import MADE, Graph, Value
from scrimp.layout import Mesh
from scrimp.move import ITEMSIZE
from scrimp.planner.cost.activation_policy import Ways
from scrimp.planner.cost.move_tables import Moves
from scrimp.planner.cost.zero_levels import Precision
from scrimp.planner.formulation.builder import (
    ACTIVATIONS,
    BACKWARD,
    BUFFERS,
    FLIGHT,
    FORWARD,
    MOVED,
    SCRATCH,
    TEMPORARIES,
    Numbers,
    Sketch,
)
from scrimp.planner.formulation.gradients import draw_gradients
from scrimp.planner.formulation.stage_boundary import NOWHERE, Outside, draw_outside
from scrimp.planner.formulation.weight_nodes import draw_buffers, draw_weights
from scrimp.planner.shard.layer_model import LayerModel, Read, Use
from scrimp.planner.shard.layer_runs import POINTS, Part, names_of_points
from scrimp.planner.shard.options import Option
from scrimp.planner.shard.placement import Placed


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Bytes per second: of a device's memory, and between device and host."""

    memory: float
    host_link: float


@dataclass(frozen=True, kw_only=True)
class Reader:
    """A user of an output: a part's group, `copies` times in it, and when."""

    part: int
    use: Use
    copies: int


class Assembly:
    """`nodes`: of each part and group; `rest`: of the weights of each part and group. `outside`: the rest of the model, where
    this is a piece of it. `accumulated`: gradients accumulate over micro-batches. `alone`: a relaxation without resharding and
    edges, in which every state at rest is sharded as far as possible; it bounds every plan from below."""

    def __init__(
        self, graph: Graph, parts: Sequence[Part], moves: Moves, precision: Precision, rates: Rates, ways: Sequence[str] = WAYS,
        *, outside: Outside = NOWHERE, accumulated: bool = False, alone: bool = False,
    ) -> None:  # fmt: skip
        self.graph, self.parts, self.moves, self.alone = graph, parts, moves, alone
        self.precision, self.rates, self.outside, self.accumulated = precision, rates, outside, accumulated
        self.part_of = {layer: k for k, part in enumerate(parts) for layer in range(part.first, part.first + part.count)}
        self.sketch = Sketch(names_of_points(graph, parts))
        self.ways: dict[tuple[int, int], Ways] = {}
        self.nodes: dict[tuple[int, int], int] = {}
        self.rest: dict[tuple[int, int], int] = {}
        for k, part in enumerate(parts):
            for g, group in enumerate(part.model.groups):
                options = part.model.options[g]
                here = self.ways[k, g] = Ways(_open(part.model, g, ways))
                names = [f"{words(moves.mesh, option)} {way}" for option in options for way in here.names]
                self.nodes[k, g] = self.sketch.node(f"{graph.layers[part.first].path}/{group.name}", names)
                ahead = np.array([option.again_seconds for option in options])
                behind = np.array([option.seconds for option in options]) - ahead
                self.sketch.cost(self.nodes[k, g], part.count * here.repeat(ahead), FORWARD)
                behind = here.repeat(behind) + here.only(RECOMPUTE, ahead)
                self.sketch.cost(self.nodes[k, g], part.count * behind, BACKWARD)
        self.inputs: dict[int, int] = {}  # nodes of inputs from other pieces, by position in `outside.arrivals`
        self.tangents: dict[tuple[int, str], int] = {}  # nodes of gradients from other pieces, by output
        self.received: dict[int, Sequence[Placed]] = {}  # the placements of either, by node
        self.owners: dict[str, tuple[int, str]] = {}  # of each weight: the first part that uses it, and its name there
        self.borrowed: list[tuple[str, int, str]] = []  # weights that another piece of the stage holds: part and name there
        for k, part in enumerate(parts):
            self._inside_operators(k, part)
            self._inside(k, part)
            self._borders(k, part)
            draw_weights(self, k, part)
        draw_buffers(self)
        draw_outside(self)

    def _inside_operators(self, k: int, part: Part) -> None:
        """Bytes that operators take while they run, and that reducing their inputs takes before."""
        for g, options in enumerate(part.model.options):
            here, node = self.ways[k, g], self.nodes[k, g]
            for before, found in ((1, [each.staging for each in options]), (0, [each.scratch for each in options])):
                for op in sorted({op for each in found for op in each}):
                    nbytes = np.array([each.get(op, 0) for each in found])
                    self.sketch.hold(node, part.point(op) - before, part.point(op) - before, SCRATCH, here.repeat(nbytes))
                    if op < part.model.forward_ops:
                        again = part.again(op) - before
                        self.sketch.hold(node, again, again, SCRATCH, here.only(RECOMPUTE, nbytes))

    # Values that stay in their layer.

    def _inside(self, k: int, part: Part) -> None:
        model, leaving = part.model, {*part.model.graph.outputs, *(name for _, name in part.model.graph.gradients)}
        left = {model.values[name].storage for name in leaving}
        for root, (first, last) in model.lives.items():
            if root in left:
                continue
            if first < model.forward_ops <= last:
                self._save(k, root)
            else:
                every = model.storage_reads.get(root, ())
                nbytes = self.ways[k, model.makers[root]].repeat(self.nbytes(model, model.makers[root], root))
                self._until_read(k, root, part.point(first), every, TEMPORARIES, nbytes)
                self.sketch.must_be(part.point(first), part.point(last), TEMPORARIES, whole_nbytes(model.values[root]))
                if last < model.forward_ops:  # recompute brings it back
                    group = model.makers[root]
                    nbytes = self.ways[k, group].only(RECOMPUTE, self.nbytes(model, group, root))
                    self.sketch.hold(self.nodes[k, group], part.again(first), part.again(last), TEMPORARIES, nbytes)
        for name, uses in model.uses.items():
            if name in model.makers and name not in leaving:
                for use in uses:
                    self._moved(k, name, k, use, name, part.count)

    def hold(self, k: int, root: str, first: int, last: int) -> None:
        """One layer holds it from when it is made to its last use; the other layers, if it is saved, hold it all the while."""
        part = self.parts[k]
        group = part.model.makers[root]
        nbytes = self.ways[k, group].repeat(self.nbytes(part.model, group, root))
        saved = first < self.turn <= last
        kind = ACTIVATIONS if saved else TEMPORARIES
        whole = whole_nbytes(part.model.values[root])
        self.sketch.hold(self.nodes[k, group], first, last, kind, nbytes)
        self.sketch.must_be(first, last, kind, whole)
        if saved and part.count > 1:
            self.sketch.hold(self.nodes[k, group], *part.span, kind, (part.count - 1) * nbytes)
            self.sketch.must_be(*part.span, kind, (part.count - 1) * whole)
        if saved:
            self.sketch.hold(self.nodes[k, group], *FLIGHT, kind, part.count * nbytes)
            self.sketch.must_be(*FLIGHT, kind, part.count * whole)

    def _save(self, k: int, root: str) -> None:
        """Holds an activation that stays in its layer and is used in the forward and in the backward."""
        part, model = self.parts[k], self.parts[k].model
        group = model.makers[root]
        node, here, nbytes = self.nodes[k, group], self.ways[k, group], self.nbytes(model, group, root)
        used, (first, last) = model.reads[root], model.lives[root]
        behind = min(op for op in used if op >= model.forward_ops)
        kept = here.only(KEEP, nbytes)
        reads = model.storage_reads[root]
        before, after = ([read for read in reads if (read.op < model.forward_ops) == way] for way in (True, False))
        self._until_read(k, root, part.point(first), reads, ACTIVATIONS, kept)
        self.sketch.hold(node, *part.span, ACTIVATIONS, (part.count - 1) * kept)
        self.sketch.hold(node, *FLIGHT, ACTIVATIONS, part.count * kept)
        for way, back in ((RECOMPUTE, part.again(first)), (OFFLOAD, part.point(behind) - 1)):
            gone = here.only(way, nbytes)
            self._until_read(k, root, part.point(first), before, TEMPORARIES, gone)
            self._until_read(k, root, back, after, ACTIVATIONS, gone)
        for when in (FORWARD, BACKWARD):
            self.sketch.cost(node, part.count * here.only(OFFLOAD, nbytes) / self.rates.host_link, when)
        whole = whole_nbytes(model.values[root])
        self.sketch.must_be(part.point(first), part.point(last), ACTIVATIONS, whole)
        self.sketch.must_be(*part.span, ACTIVATIONS, (part.count - 1) * whole)
        self.sketch.must_be(*FLIGHT, ACTIVATIONS, part.count * whole)

    def _until_read(self, k: int, root: str, first: int, reads: Sequence[Read], kind: str, nbytes: Numbers) -> None:
        """Holds a storage until its last read. If the last reader gets a resharded copy, the storage is freed with that: by
        options of both groups."""
        part, model = self.parts[k], self.parts[k].model
        node = self.nodes[k, model.makers[root]]

        def stays(read: Read) -> int:
            return part.point(read.op)

        def moves(read: Read) -> int:
            same = (read.at < model.forward_ops) == (read.op < model.forward_ops)
            return part.point(read.at if same else read.op) - 1  # the backward reshards again

        last = max(reads, key=stays, default=None)
        if last is None or last.value is None:
            self.sketch.hold(node, first, max([first, *map(stays, reads)]), kind, nbytes)
            return
        alike = [read for read in reads if (read.value, read.group) == (last.value, last.group)]
        base = max([first, *(stays(read) for read in reads if read not in alike), *map(moves, alike)])
        self.sketch.hold(node, first, base, kind, nbytes)
        if self.alone or stays(last) <= base:
            return
        maker, user = model.makers[last.value], last.group
        assert user is not None
        made = self.ways[k, maker].spread([option.made[last.value] for option in model.options[maker]])
        needed = self.ways[k, user].spread([option.needed[last.value] for option in model.options[user]])
        _, copies, _ = self.moves.tables(made, needed, ITEMSIZE[model.values[last.value].dtype])
        self.sketch.pair_hold(node, self.nodes[k, user], base + 1, stays(last), kind, nbytes[:, None] * (copies == 0))

    @property
    def turn(self) -> int:
        """The first point of the backward."""
        return self.parts[-1].forward + POINTS * self.parts[-1].model.forward_ops

    # Values that go to another layer, and their gradients that come back.

    def _borders(self, k: int, part: Part) -> None:
        model = part.model
        tangents = dict(model.graph.tangents)
        for output in model.graph.outputs:
            root = model.values[output].storage
            readers = [*self.readers(k, output)]
            for reader in readers:
                name = self.input_name(reader.part, k, output)
                self._moved(k, output, reader.part, reader.use, name, reader.copies)
                self._gradient_back(k, tangents.get(output), reader, name)
            if root in model.lives:
                first, last = model.lives[root]
                # The part's last layer is modelled: its outputs go to other parts alone.
                behind = [self.parts[r.part].point(span[1]) for r in readers if r.part != k for span in r.use.spans]
                self.hold(k, root, part.point(first), max([part.point(last), *behind]))
        inputs = dict(zip(model.borders, self.graph.layers[part.last].inputs, strict=True))
        draw_gradients(self, k, part)
        for name, source in inputs.items():
            if source.layer is None and name in model.uses and source.name not in self.outside.arrivals:
                group = model.uses[name][0].group
                numel = self.ways[k, group].spread([self.numel(option.needed[name]) for option in model.options[group]])
                for span in ((0, self.sketch.points - 1), FLIGHT):
                    nbytes = ITEMSIZE[model.values[name].dtype] * np.array(numel)
                    self.sketch.hold(self.nodes[k, group], *span, BUFFERS, nbytes)
                    self.sketch.must_be(*span, BUFFERS, whole_nbytes(model.values[name]))

    def readers(self, k: int, output: str) -> Iterator[Reader]:
        """Groups of later layers that use an output of this part; within the part, all layers but the first use that of the layer
        before."""
        for other, reading in enumerate(self.parts):
            count = 0
            for layer in range(reading.first, reading.first + reading.count):
                count += any(
                    source.layer is not None and self.part_of[source.layer] == k and source.name == output
                    for source in self.graph.layers[layer].inputs
                )
            if count:
                for use in reading.model.uses.get(self.input_name(other, k, output), ()):
                    yield Reader(part=other, use=use, copies=count)

    def input_name(self, reading: int, k: int, output: str) -> str:
        part = self.parts[reading]
        for layer in range(part.first, part.first + part.count):
            for name, source in zip(part.model.borders, self.graph.layers[layer].inputs, strict=True):
                if source.layer is not None and self.part_of[source.layer] == k and source.name == output:
                    return name
        raise LookupError(output)

    def _gradient_back(self, k: int, tangent: str | None, reader: Reader, name: str) -> None:
        """An edge from the group that makes an input's gradient to those that need the output's gradient."""
        behind = self.parts[reader.part].model
        gradient = dict(behind.graph.gradients).get(name)
        if tangent is None or gradient is None or reader.use is not behind.uses[name][0]:
            return  # made once, for all users of the input
        for use in self.parts[k].model.uses.get(tangent, ()):
            self._moved(reader.part, gradient, k, use, tangent, reader.copies)

    # Resharding.

    def _moved(self, maker: int, name: str, user: int, use: Use, as_name: str, copies: int) -> None:
        """Adds the edge from a value's maker to a group that uses it, under the name it has there."""
        one = self.parts[maker].model
        if self.alone or name not in one.makers:
            return
        group = one.makers[name]
        made = self.ways[maker, group].spread([option.made[name] for option in one.options[group]])
        a, b, part = self.nodes[maker, group], self.nodes[user, use.group], self.parts[user]
        again = self.used(a, made, user, use, as_name, copies, donated=self._last_phase(maker, name, user, use))
        if again is None or use.forward is None:
            return
        root = one.values[name].storage
        if root not in one.lives:
            return  # a view of a value from another layer
        inside = name not in one.graph.outputs
        # A view is there as long as its storage is: by the policy of the group that made that.
        owner = one.makers[root]
        a, here = self.nodes[maker, owner], self.ways[maker, owner]
        share = min(1.0, whole_nbytes(one.values[name]) / max(1, whole_nbytes(one.values[root])))
        nbytes = np.ceil(share * self.nbytes(one, owner, root)).astype(np.int64)
        if not self._is_kept(maker, name, user, as_name):
            there = here.repeat(nbytes)[:, None]
            if inside:
                there = there * ~here.mask(RECOMPUTE, len(one.options[owner]))[:, None]
            self.sketch.pair_hold(a, b, part.point(use.forward[1]), part.again(use.forward[1]), ACTIVATIONS, there * again)
            self.sketch.pair_hold(a, b, *part.span, ACTIVATIONS, (part.count - 1) * there * again)
            self.sketch.pair_hold(a, b, *FLIGHT, ACTIVATIONS, part.count * there * again)
        elif inside:  # offloaded values come back for it, earlier than for their own backward
            back = here.only(OFFLOAD, nbytes)[:, None] * again
            first = min(op for op in one.reads[root] if op >= one.forward_ops)
            self.sketch.pair_hold(a, b, part.again(use.forward[0]) - 1, part.point(first) - 2, ACTIVATIONS, back)

    def _last_phase(self, maker: int, name: str, user: int, use: Use) -> str | None:
        """The phase in which a group is the last to read a storage, which is then freed with its resharding."""
        model = self.parts[maker].model
        reads = model.storage_reads.get(model.values[name].storage, ())
        leaves = {model.values[each].storage for each in (*model.graph.outputs, *(each for _, each in model.graph.gradients))}
        if maker != user or not reads or model.values[name].storage in leaves:
            return None
        last = max(reads, key=lambda read: read.op)
        if (last.value, last.group) != (name, use.group):
            return None
        return FORWARD if last.op < model.forward_ops else BACKWARD

    def used(
        self, node: int, made: Sequence[Placed], user: int, use: Use, name: str, copies: int, *, donated: str | None = None
    ) -> Numbers | None:
        """Adds the cost of a node's value for a group that uses it: resharding, and the copies while they are used. If the
        group's forward is recomputed, the value is resharded once more, and must still be held, or be recomputed too: returns by
        which of the group's options, if by any. `donated`: the phase in which the value is freed with its resharding."""
        part, ways = self.parts[user], self.ways[user, use.group]
        options = part.model.options[use.group]
        needed = ways.spread([option.needed[name] for option in options])
        value = part.model.values[name]
        seconds, nbytes, staging = self.moves.tables(made, needed, ITEMSIZE[value.dtype], value.order, given=value.kind != MADE)
        scratch = {FORWARD: staging, BACKWARD: staging}
        if donated is not None:
            *_, scratch[donated] = self.moves.tables(made, needed, ITEMSIZE[value.dtype], value.order, donated=True)
        pair = (node, self.nodes[user, use.group])
        for span, when in ((use.forward, FORWARD), (use.backward, BACKWARD)):
            if span is not None:
                self.sketch.pair_cost(*pair, copies * seconds, when)
                before = part.point(span[0]) - 1
                self.sketch.pair_hold(*pair, before, part.point(span[1]), MOVED, nbytes)
                self.sketch.pair_hold(*pair, before, before, SCRATCH, scratch[when])
        if use.forward is None or RECOMPUTE not in ways.names:
            return None
        again = ways.mask(RECOMPUTE, len(options))[None, :]
        self.sketch.pair_cost(*pair, copies * seconds * again, BACKWARD)
        before, last = part.again(use.forward[0]) - 1, part.again(use.forward[1])
        self.sketch.pair_hold(*pair, before, last, MOVED, nbytes * again)
        self.sketch.pair_hold(*pair, before, before, SCRATCH, scratch[FORWARD] * again)
        return again

    def _is_kept(self, maker: int, name: str, user: int, as_name: str) -> bool:
        """Whether the user's backward finds it anyhow, if it is kept at all."""
        model = self.parts[maker].model
        if name in model.graph.outputs:
            return any(use.backward is not None for use in self.parts[user].model.uses[as_name])
        return model.lives[model.values[name].storage][1] >= model.forward_ops

    def nbytes(self, model: LayerModel, group: int, name: str) -> Numbers:
        itemsize = ITEMSIZE[model.values[name].dtype]
        return itemsize * np.array([self.numel(option.made[name]) for option in model.options[group]])

    def numel(self, place: Placed) -> int:
        return place.numel(self.moves.sizes)


def whole_nbytes(value: Value) -> int:
    """Bytes of one full copy, over all devices."""
    return prod(value.shape) * ITEMSIZE[value.dtype]


def _saves(model: LayerModel, g: int) -> bool:
    """Whether a group's forward makes something that the backward uses."""
    return any(model.makers[root] == g and first < model.forward_ops <= last for root, (first, last) in model.lives.items())


def _open(model: LayerModel, g: int, ways: Sequence[str]) -> tuple[str, ...]:
    """The activation policies open to a group. A group that saves nothing may need recompute for others of its layer that do:
    else its outputs would have to be kept for them."""
    if _saves(model, g):
        return tuple(ways)
    needed = any(model.makers.get(name) == g and any(use.forward for use in uses) for name, uses in model.uses.items())
    return tuple(way for way in ways if way == KEEP or (way == RECOMPUTE and needed))


def words(mesh: Mesh, option: Option) -> str:
    """The atom of each axis, as text."""
    return " ".join(f"{axis}:{'-' if atom is None else atom}" for axis, atom in zip(mesh.names, option.split, strict=True))
