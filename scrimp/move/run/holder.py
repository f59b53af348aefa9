"""The array of a rank between the steps of a program, and where boxes lie in arrays."""

from __future__ import annotations

import torch

from scrimp.layout import Box


class Holder:
    """The array between steps. It has the only reference to the array, so that `release` frees the memory at once."""

    def __init__(self, local: torch.Tensor, *, donate: bool) -> None:
        self.array = local
        self._input: torch.Tensor | None = local
        self._donate = donate

    def release(self) -> None:
        """Frees the array: all parts still needed have been packed."""
        if self._input is None:
            free(self.array)
        elif self._donate:
            free(self._input)
        self.array = self.array.new_empty(0)
        self._input = None

    def finish(self) -> torch.Tensor:
        """The result: contiguous, and sharing no storage with an input."""
        if self._input is None and self.array.is_contiguous():
            return self.array
        result = self.array.clone(memory_format=torch.contiguous_format)
        self.release()
        return result


def free(array: torch.Tensor) -> None:
    """Frees the memory of an array at once. The backend's thread may hold the tensors of its last call a little longer."""
    storage = array.untyped_storage()
    # Contiguous and as large as the storage: it is all of it, not an expanded view.
    if storage.resizable() and array.is_contiguous() and storage.nbytes() == array.nbytes:
        storage.resize_(0)


def contiguous(holder: Holder) -> torch.Tensor:
    """The array as contiguous memory; if that takes a copy, the array is freed."""
    array = holder.array
    if array.is_contiguous():
        return array
    copied = copy_of(array)
    del array
    holder.release()
    return copied


def shape_of(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def view_of(array: torch.Tensor, box: Box, inside: Box) -> torch.Tensor:
    """The view of the box in an array that holds the box `inside`."""
    index = tuple(slice(a - lo, b - lo) for (a, b), (lo, _) in zip(box, inside, strict=True))
    return array[index] if index else array


def copy_of(array: torch.Tensor) -> torch.Tensor:
    return array.clone(memory_format=torch.contiguous_format)


def is_one_piece(whole: Box, box: Box) -> bool:
    """Whether a part is contiguous in the contiguous array that holds `whole`."""
    split = False
    for (start, stop), (lo, hi) in zip(box, whole, strict=True):
        if split and (start, stop) != (lo, hi):
            return False
        split = split or stop - start > 1
    return True


def are_in_order(whole: Box, boxes: list[Box]) -> bool:
    """Whether boxes of equal size that make up an array lie one behind the other in it."""
    return boxes == sorted(boxes) and all(is_one_piece(whole, box) for box in boxes)
