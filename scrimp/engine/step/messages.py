"""Error messages for a step that does not fit, or whose loss or gradient cannot be trained on."""

from __future__ import annotations

import torch
from torch import nn

from scrimp._arguments import RECOMPUTE
from scrimp.chunks import Meter
from scrimp.engine.chunked_loss import logits_hint
from scrimp.errors import FitError, RunError
from scrimp.ledger import Books, format_nbytes


def vocabs(model: nn.Module) -> set[int]:
    """Possible sizes of the last dim of logits: of embeddings with more rows than columns, and of the last matrix. A table of
    positions is seldom such an embedding."""
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    sizes = {table.num_embeddings for table in tables if table.num_embeddings > table.embedding_dim}
    heads = [module.out_features for module in model.modules() if isinstance(module, nn.Linear)]
    return sizes | {*heads[-1:]}


def does_not_fit(step: int, books: Books, meter: Meter, model: nn.Module, ways: tuple[str, ...]) -> FitError:
    total, (nbytes, shape), budget_nbytes = books.total_nbytes, meter.largest(), meter.budget_nbytes
    hint = logits_hint(total, nbytes, shape, vocabs(model))
    return FitError(
        f"step {step} needs {_exact(total, budget_nbytes)} or more on the device, the budget is {_exact(budget_nbytes, total)} "
        f"({books.snapshot()}). "
        + ("Use a smaller batch" if RECOMPUTE in ways else "Use activations='auto' or a smaller batch")
        + ", more micro_batches, or a larger Memory(device=...)"
        + (f"; {hint}" if hint else ""),
        tier="device",
    )


def _exact(nbytes: int, other_nbytes: int) -> str:
    """A size; in bytes if the rounded sizes would read the same."""
    short = format_nbytes(nbytes)
    return f"{nbytes} bytes" if short == format_nbytes(other_nbytes) else short


def check_loss(loss: torch.Tensor, model: nn.Module) -> None:
    if loss.requires_grad:
        return
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise RunError("no parameter of the model is trained (requires_grad is False for all): engine.evaluate needs no step")
    raise RunError(
        "the loss depends on no trained parameter: was it detached, made under torch.no_grad(), or taken from .item()?"
    )


def check_gradient(name: str, gradient: torch.Tensor, *, in_backward: bool, again: bool) -> None:
    if gradient.layout is not torch.strided:
        raise RunError(
            f"the gradient of {name} has the layout {gradient.layout}, and the engine trains with dense gradients only: call "
            "torch.nn.functional.embedding and embedding_bag with sparse=False"
        )
    if not in_backward:
        raise RunError(
            f"a gradient for {name} before the engine's backward: the model or the loss function called backward() itself; "
            "return the loss, and the engine calls backward"
        )
    if again:
        raise RunError(
            f"a second gradient for {name} in one backward: use checkpoint(..., use_reentrant=False), "
            "and call backward once per step"
        )
