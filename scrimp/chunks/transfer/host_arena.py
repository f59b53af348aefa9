"""Host memory for model data: private anonymous mappings, one per layer and kind.

A mapping begins on its own page, so it can be registered with CUDA without rounding sizes up. It is zero without being touched,
uses huge pages where the system allows, and returns to the system at once when it is freed.
"""

from __future__ import annotations

import mmap
import weakref

import torch

from scrimp.errors import RunError

HUGE = 2 << 20


def arena(numel: int, dtype: torch.dtype, *, pinned: bool = False) -> torch.Tensor:
    """Zeros on the host; `pinned` registers them with CUDA, so that copies can overlap with compute."""
    nbytes = numel * dtype.itemsize
    if not nbytes:
        return torch.empty(0, dtype=dtype)
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(mapping, dtype=dtype)
    if pinned:
        tensor.zero_()  # by all threads, because registering would touch the pages sequentially
        register(tensor)
    return tensor


def register(tensor: torch.Tensor) -> None:
    """Pins the memory. Touch its pages before, because registering touches them sequentially."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = tensor.data_ptr()
    error = runtime.cudaHostRegister(address, tensor.nbytes, 0)
    if int(error) != 0:
        raise RunError(
            f"CUDA could not register {tensor.nbytes} bytes of host memory (error {int(error)}); is `ulimit -l` too small?"
        )
    weakref.finalize(tensor.untyped_storage(), runtime.cudaHostUnregister, address)
