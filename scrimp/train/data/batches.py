"""The batches of a run, and the part of each that a rank takes. Training samples come in the seed's order, held-out ones as they
are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import default_collate

from scrimp.errors import RunError, ScrimpError
from scrimp.train.data.order import Order
from scrimp.train.data.sources import Samples


class PlannedPart(Protocol):
    """The part of a tensor that a rank takes under a plan, as `engine.batch_part` has it. `of`: the global shape."""

    @property
    def of(self) -> tuple[int, ...]: ...

    @property
    def index(self) -> tuple[slice, ...] | None: ...


@dataclass(frozen=True, kw_only=True)
class Split:
    """Numbers of samples: the first `training` are trained on, the last `held_out` are for validation."""

    training: int
    held_out: int

    @classmethod
    def of(cls, samples: int, share: float, batch: int) -> Split:
        """`share`: of the held-out samples; 0 for none."""
        held_out = round(samples * share)
        training = samples - held_out
        if share and held_out < batch:
            raise ScrimpError(
                f"[validation] share = {share:g} of {samples} samples are {held_out}, and a batch is {batch}: set a larger "
                "share, a smaller [train] batch, or give more data"
            )
        if training < batch:
            raise ScrimpError(
                f"the data have {training} samples to train on, and a batch is {batch}: set a smaller [train] batch, a smaller "
                "[data] seq, or give more data"
            )
        return cls(training=training, held_out=held_out)


class Batches:
    """Of a run: `batch` samples each, over all ranks."""

    def __init__(self, samples: Samples, split: Split, *, batch: int, seed: int) -> None:
        self._samples, self._batch = samples, batch
        self.split = split
        self.order = Order(samples=split.training, seed=seed)

    def training(self, step: int, rows: slice) -> Any:
        """Some rows of the batch of a step."""
        return self._collated(self.order.step(step, self._batch)[rows])

    def validation(self, number: int, rows: slice) -> Any:
        """The same of a validation batch."""
        first = self.split.training + number * self._batch
        return self._collated(range(first, first + self._batch)[rows])

    @property
    def validations(self) -> int:
        """Whole validation batches."""
        return self.split.held_out // self._batch

    def _collated(self, rows: Sequence[int]) -> Any:
        return default_collate([self._samples[row] for row in rows])


def even_rows(batch: int, rank: int, world: int) -> slice:
    """Without a plan: equal parts, in the order of ranks."""
    if batch % world:
        raise RunError(f"[train] batch is {batch}, which {world} ranks do not divide: set it to a multiple of {world}")
    each = batch // world
    return slice(rank * each, (rank + 1) * each)


def planned_rows(parts: Mapping[str, PlannedPart], batch: int) -> slice:
    """Under a plan: the rows that this rank takes of every tensor. If it takes other rows of each tensor, or parts of other dims,
    all rows: the engine then cuts its part out of the global batch."""
    every, found = slice(0, batch), None
    for part in parts.values():
        if part.index is None or not part.index:
            return every
        others = zip(part.index[1:], part.of[1:], strict=True)
        if found not in (None, part.index[0]) or any((each.start, each.stop) != (0, size) for each, size in others):
            return every
        found = part.index[0]
    return found or every


def arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of the model's forward."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}


def on_meta(sample: Any, batch: int) -> Any:
    """A batch of the shapes of one sample, on meta."""

    def widened(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            raise RunError(f"a sample holds a {type(leaf).__name__}; a dataset for a plan has tensors alone")
        return leaf.new_empty((batch, *leaf.shape), device="meta")

    return tree_map(widened, sample)
