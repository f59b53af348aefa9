"""Modules that the engine cannot run as they are: refused with a remedy, or changed with a warning."""

from __future__ import annotations

from torch import nn

from scrimp._warnings import warn
from scrimp.engine.setup.compiled_private import compiled
from scrimp.errors import RunError

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def check_modules(model: nn.Module) -> None:
    """Checks the model when Engine is built."""
    refuse_compiled(model)
    for path, module in model.named_modules():
        if isinstance(module, EMBEDDINGS) and module.max_norm is not None:
            raise RunError(
                f"{_named(path, module)} has max_norm={module.max_norm}: its forward rescales its own weights, and that change "
                "would be lost, because the engine keeps the weights; build it with max_norm=None"
            )
    dense_embeddings(model)


def refuse_compiled(model: nn.Module) -> None:
    """Raises if a module is compiled. Runs at construction and before every step, as a module may be compiled at any time."""
    found = compiled(model)
    if found is None:
        return
    path, how = found
    raise RunError(
        f"{path or 'the model itself'!r} is compiled ({how}): the engine has to see each layer's operators one by one, and does "
        "not run compiled layers yet; give it the model as it was before it was compiled"
        + (" (compiled._orig_mod is that model)" if how == "torch.compile(module)" else "")
    )


def dense_embeddings(model: nn.Module) -> None:
    """Makes embeddings with sparse=True dense, because a gradient reuses the whole buffer of its weight."""
    sparse = {path: module for path, module in model.named_modules() if isinstance(module, EMBEDDINGS) and module.sparse}
    for module in sparse.values():
        module.sparse = False
    if sparse:
        names = ", ".join(map(repr, [*sparse][:3])) + (f" and {len(sparse) - 3} more" if len(sparse) > 3 else "")
        warn(
            f"sparse=True of {names} is now sparse=False: the engine trains embeddings with dense gradients, with the numbers "
            "of sparse=False in plain PyTorch; set sparse=False in the model, and this warning goes"
        )


def _named(path: str, module: nn.Module) -> str:
    return f"'{path}' ({type(module).__name__})" if path else type(module).__name__
