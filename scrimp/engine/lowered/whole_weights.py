"""Under a plan a forward of the model itself, for `engine.evaluate`: each operator gathers the whole weights that it uses.

A plan has no program for it: it computes a loss, in training mode, for one shape. So the model runs eagerly, with any batch, on
every rank alike. A weight is there from the first operator that uses it until another one needs other weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from scrimp.chunks import PlainMode, Store
from scrimp.engine.lowered.weights import EngineWeights


class WholeWeights(PlainMode):
    """`parameters`: the model's, by name, whose storages are empty outside."""

    def __init__(self, weights: EngineWeights, store: Store, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights, self._store = weights, store
        self._names = {p.untyped_storage()._cdata: name for name, p in parameters.items() if name in weights.places}
        self._parameters = parameters
        self._here: dict[str, int] = {}  # gathered weights, and their bytes

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._let_go(())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._bring(tree_leaves((args, kwargs)))
        return func(*args, **(kwargs or {}))

    def kept(self, leaf: Any) -> Any:
        """Clones a weight that leaves the engine, because its storage is freed."""
        if not isinstance(leaf, torch.Tensor) or self._name(leaf) is None:
            return leaf
        return leaf.clone()

    def _name(self, leaf: Any) -> str | None:
        if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
            return None
        return self._names.get(leaf.untyped_storage()._cdata)

    def _bring(self, leaves: list[Any]) -> None:
        used = tuple(name for name in map(self._name, leaves) if name is not None)
        missing = [name for name in dict.fromkeys(used) if name not in self._here]
        if not missing:
            return
        self._let_go(used)
        for name in missing:
            whole, parameter = self._weights.whole(name), self._parameters[name]
            parameter.untyped_storage().resize_(parameter.nbytes)
            self._store.ledger.charge("parameters", parameter.nbytes)
            self._here[name] = parameter.nbytes
            parameter.data.copy_(whole)

    def _let_go(self, used: tuple[str, ...]) -> None:
        for name in [name for name in self._here if name not in used]:
            self._parameters[name].untyped_storage().resize_(0)
            self._store.ledger.free("parameters", self._here.pop(name))
