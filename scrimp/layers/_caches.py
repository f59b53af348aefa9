"""Disables key-value caches while training: a recomputed layer would append to its cache a second time, and another layer would
keep copies of its keys and values that nothing reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def no_caches(model: nn.Module) -> Iterator[None]:
    """Sets `use_cache` in the config, which Hugging Face models read if the call does not set it."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None)) is not None}
    caching = [config for config in configs.values() if getattr(config, "use_cache", None) is True]
    for config in caching:
        config.use_cache = False
    try:
        yield
    finally:
        for config in caching:
            config.use_cache = True
