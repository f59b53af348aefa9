"""No key-value caches while training: a layer that is recomputed would append to its cache a second time, and one that is
not would keep copies of its keys and values that nobody reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def no_caches(model: nn.Module) -> Iterator[None]:
    """Hugging Face models take `use_cache` from their config where the call does not say it."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None)) is not None}
    caching = [config for config in configs.values() if getattr(config, "use_cache", None) is True]
    for config in caching:
        config.use_cache = False
    try:
        yield
    finally:
        for config in caching:
            config.use_cache = True
