"""The captured model for a plan: from the cache, or captured by one rank for all ranks with the same model.

Every rank makes the key of its own model (`capture_key`). Rank 0 finds the graph and sends it; a rank whose key is another one,
or that has none, captures by itself. The plan's fingerprint is checked afterwards, whatever the graph's origin.
"""

from __future__ import annotations

import warnings

import torch
from torch import nn

from scrimp.capture import Graph, capture_key, from_json, load_graph, save_graph, to_json
from scrimp.chunks import Wire
from scrimp.planner import Plan


def graph_of(plan: Plan, model: nn.Module, wire: Wire) -> Graph:
    batch = [(each.name, each.shape, each.dtype) for each in plan.batch]
    key = capture_key(model, plan.precision, plan.optimizer, batch)
    if wire.world == 1:
        return _found(plan, model, key)
    keys = wire.every(torch.frombuffer(bytearray(bytes.fromhex(key or "00" * 32)), dtype=torch.int64))
    if not bool(keys[0].any()):
        return _found(plan, model, key)
    alike = torch.equal(keys[wire.rank], keys[0])
    graph: Graph | None = None
    text = b""
    try:
        if wire.rank == 0:
            graph = _found(plan, model, key)
            text = to_json(graph).encode()
    finally:  # also after an error: the other ranks wait, and then find it themselves
        size = int(wire.from_first(torch.tensor([len(text)])))
        if size:
            given = bytearray(text) if wire.rank == 0 else bytearray(size)
            text = bytes(wire.from_first(torch.frombuffer(given, dtype=torch.uint8)).numpy())
    if graph is None and alike and text:
        return from_json(text.decode())
    return _found(plan, model, key) if graph is None else graph


def _found(plan: Plan, model: nn.Module, key: str | None) -> Graph:
    """From the cache; else captured, and put there. A capture that warns is made again at every start."""
    graph = load_graph(key) if key is not None else None
    if graph is not None:
        return graph
    from scrimp.planner import captured_for  # loads torch's compiler, which nothing else here needs

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UserWarning)
        graph = captured_for(plan, model)
    for each in said:
        warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    if key is not None and not said:
        save_graph(key, graph)
    return graph
